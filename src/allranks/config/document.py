"""YAML as a user wrote it: values, and the line of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from allranks.errors import Problem

_SHOWN_LENGTH = 80


@dataclass(frozen=True, kw_only=True)
class Document:
    """One YAML mapping.

    Attributes:
        values: what it says; empty where it could not be read.
        lines: line, from 1, of each key by its dotted path.
        problems: syntax errors and keys that are given twice.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class CoreSchemaLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2.

    PyYAML follows YAML 1.1, where ``1e-4`` is a text, ``no`` a boolean, ``010`` the number 8, ``1:30`` 90, and
    ``2026-01-31`` a date.
    """


CoreSchemaLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in {"bool", "int", "float", "timestamp"}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
CoreSchemaLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
CoreSchemaLoader.add_implicit_resolver(  # before the float's, whose pattern fits whole numbers too
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
CoreSchemaLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def _integer(loader: CoreSchemaLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


CoreSchemaLoader.add_constructor("tag:yaml.org,2002:int", _integer)


class CoreSchemaDumper(yaml.SafeDumper):
    """Writes plain only what PyYAML and `CoreSchemaLoader` both read as it was: the text ``1e5`` gets quotes."""


CoreSchemaDumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *CoreSchemaLoader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in (*yaml.SafeDumper.yaml_implicit_resolvers, *CoreSchemaLoader.yaml_implicit_resolvers)
}


def read_document(text: str, loader: type[yaml.SafeLoader] = CoreSchemaLoader) -> Document:
    """Read one YAML mapping.

    Args:
        text: the file's content.
        loader: which scalars mean what; `yaml.SafeLoader` reads a file as accelerate does.
    """
    node, values, problem = _load(text, loader)
    if problem is not None:
        return Document(problems=(problem,))
    if values is None:
        return Document()
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        start = Problem(path="line 1", message=f"starts with {shown(values)}, not with a key and a colon")
        return Document(problems=(start,))
    lines: dict[str, int] = {}
    problems = tuple(_walk(node, "", lines, set()))
    return Document(values={str(key): value for key, value in values.items()}, lines=lines, problems=problems)


def read_value(text: str) -> tuple[Any, Problem | None]:
    """Read one YAML value, as given on the command line; or say why it can't be read."""
    _, value, problem = _load(text, CoreSchemaLoader)
    return value, problem


def _load(text: str, loader: type[yaml.SafeLoader]) -> tuple[yaml.Node | None, Any, Problem | None]:
    where, fix = "the file", None
    try:
        return yaml.compose(text, loader), yaml.load(text, loader), None
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        if mark := error.problem_mark or error.context_mark:
            where = f"line {mark.line + 1}, column {mark.column + 1}"
        if r"'\t'" in what:
            fix = "indent with spaces"
    except yaml.reader.ReaderError as error:
        where = f"line {text.count(chr(10), 0, error.position) + 1}"
        what = f"character {chr(error.character)!r} is not allowed"
    except RecursionError:
        what = "it is nested too deeply"
    except (ValueError, AttributeError) as error:  # how PyYAML's constructors fail on `!!int x` or `!!timestamp x`
        what = str(error)
    return None, None, Problem(path=where, message=f"is not valid YAML: {what}", fix=fix)


def _walk(node: yaml.MappingNode, prefix: str, lines: dict[str, int], above: set[int]) -> Iterator[Problem]:
    if id(node) in above:  # an alias to a mapping around it
        return
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if path in lines:
            yield Problem(
                path=path,
                message=f"is given again on line {line}",
                fix="keep one of them",
            )
        lines.setdefault(path, line)
        if isinstance(value, yaml.MappingNode):
            yield from _walk(value, f"{path}.", lines, above | {id(node)})


def shown(value: object) -> str:
    """`value` as YAML writes it, cut to one short line."""
    match value:
        case None:
            text = "null"
        case bool():
            text = str(value).lower()
        case _:
            text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"
