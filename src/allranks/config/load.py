"""From `run.yaml` and `--set` to a validated configuration, or to every problem at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from allranks.config.document import read_document, read_value, shown
from allranks.config.fields import key_specs, nearest, section_models
from allranks.config.paths import resolve_paths
from allranks.config.rules import broken_rules, unfit_file_name
from allranks.config.schema import RunConfig
from allranks.config.wrong import unknown_key, wrong_value
from allranks.errors import Problem, ProblemsError

_HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}")
_COMMAND_LINE = "--set"


Contradictions = Callable[[RunConfig], list[Problem]]
"""Problems of a configuration with something that is given beside it; keys with problems of their own are at their
defaults."""


def load_run_config(
    path: Path, overrides: Sequence[str] = (), *, name: str | None = None, contradictions: Contradictions | None = None
) -> RunConfig:
    """Read and validate `run.yaml`.

    Relative paths in it start at its own folder; those in `overrides` at the working directory.

    Args:
        path: the YAML file.
        overrides: values of `--set`, each ``section.key=value`` with the value in YAML.
        name: value of `--name`, which sets ``output.name``. Without either the run is called after the file.
        contradictions: what else to look for.

    Raises:
        ProblemsError: everything that is wrong with it, in the order of the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProblemsError(
            str(path), [Problem(path="the file", message=f"is not UTF-8 text: {error.reason}")]
        ) from None
    except OSError as error:
        siblings = sorted(file.name for file in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        problem = Problem(
            path="the file",
            message=f"can't be read: {error.strerror}",
            choices=tuple(siblings),
            nearest=nearest(path.name, siblings),
        )
        raise ProblemsError(str(path), [problem]) from None
    return parse_run_config(
        text,
        source=str(path),
        folder=path.parent,
        overrides=overrides,
        name=name,
        file_name=path.name,
        contradictions=contradictions,
    )


def parse_run_config(
    text: str,
    *,
    source: str,
    folder: Path,
    overrides: Sequence[str] = (),
    name: str | None = None,
    file_name: str | None = None,
    contradictions: Contradictions | None = None,
) -> RunConfig:
    """Validate the text of a `run.yaml`.

    Args:
        text: its content.
        source: what error messages call it.
        folder: where relative paths in it start.
        overrides: values of `--set`; relative paths in them start at the working directory.
        name: value of `--name`, which sets ``output.name``.
        file_name: its stem names the run if nothing else does.
        contradictions: what else to look for.

    Raises:
        ProblemsError: everything that is wrong with it, in the order of the file.
    """
    document = read_document(text)
    given, problems = _sections(document.values)
    settings, setting_problems = _settings(overrides)
    for setting in settings:
        given[setting.section][setting.key] = setting.value
    from_command_line = {setting.path for setting in settings}
    if name is not None:
        given["output"]["name"] = name
    problems += [*document.problems, *setting_problems, *_tokens(text, overrides)]
    if document.values or not document.problems:
        resolved, path_problems = resolve_paths(given, folder, from_command_line)
        config, section_problems = _validate(resolved, {problem.path for problem in path_problems}, contradictions)
        problems += [*path_problems, *section_problems]
        if file_name is not None and given["output"].get("name") is None:
            problems += unfit_file_name(file_name)
        if config is not None and not problems:
            return config
    problems.sort(key=lambda problem: document.lines.get(problem.path, math.inf))
    places = {path: f"line {line}" for path, line in document.lines.items()}
    places |= dict.fromkeys(from_command_line, _COMMAND_LINE)
    if name is not None:
        places["output.name"] = "--name"
    raise ProblemsError(source, [_located(problem, places) for problem in problems])


def _located(problem: Problem, places: dict[str, str]) -> Problem:
    """`problem` with the place it comes from, and with no hub token in it."""
    place = f" ({places[problem.path]})" if problem.path in places else ""
    return replace(
        problem,
        path=_HUB_TOKEN.sub("hf_…", problem.path),
        message=_HUB_TOKEN.sub("hf_…", problem.message) + place,
        fix=None if problem.fix is None else _HUB_TOKEN.sub("hf_…", problem.fix),
    )


def _sections(values: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """The keys of each section of the schema as given, and the problems of the top level."""
    given: dict[str, dict[str, Any]] = {name: {} for name in section_models()}
    problems = []
    for name, value in values.items():
        if name not in given:
            problems.append(unknown_key(None, name, value))
        elif isinstance(value, dict):
            given[name] = {str(key): item for key, item in value.items()}
        elif value is not None:
            problems.append(
                Problem(
                    path=name,
                    message=f"{shown(value)} is not a section",
                    fix=f"write its keys below `{name}:`, each on a line of its own and indented",
                )
            )
    return given, problems


@dataclass(frozen=True, kw_only=True)
class _Setting:
    section: str
    key: str
    value: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"


def _settings(overrides: Iterable[str]) -> tuple[list[_Setting], list[Problem]]:
    settings, problems = [], []
    for override in overrides:
        path, equals, text = override.partition("=")
        section, _, key = path.strip().partition(".")
        value, unreadable = read_value(text)
        if not equals or not section:
            problems.append(
                Problem(
                    path=f"{_COMMAND_LINE} {override}",
                    message="is not of the form section.key=value",
                    fix=f"write for example {_COMMAND_LINE} training.learning_rate=1e-4",
                )
            )
        elif unreadable is not None:
            problems.append(
                replace(unreadable, path=f"{_COMMAND_LINE} {path}", message=f"{text!r} {unreadable.message}")
            )
        elif section not in section_models():
            problems.append(replace(unknown_key(None, path.strip(), value), path=f"{_COMMAND_LINE} {path}"))
        elif not key:
            keys = tuple(spec.name for spec in key_specs().values() if spec.section == section)
            problems.append(
                Problem(path=f"{_COMMAND_LINE} {path}", message="is a section; name a key in it", choices=keys)
            )
        else:
            settings.append(_Setting(section=section, key=key, value=value))
    return settings, problems


def _tokens(text: str, overrides: Iterable[str]) -> list[Problem]:
    places = [f"line {number}" for number, line in enumerate(text.split("\n"), 1) if _HUB_TOKEN.search(line)]
    places += [f"{_COMMAND_LINE} {item.partition('=')[0]}" for item in overrides if _HUB_TOKEN.search(item)]
    return [
        Problem(
            path=place,
            message="holds what looks like a hub token",
            fix="remove it, and revoke it if others have seen it; log in once with `hf auth login` instead",
        )
        for place in places
    ]


def _validate(
    given: dict[str, dict[str, Any]], wrong: set[str], contradictions: Contradictions | None
) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration, or the problems of single keys and those between keys.

    Args:
        given: keys of each section.
        wrong: keys that are known to have a problem already.
        contradictions: what else to look for.
    """
    sections: dict[str, BaseModel] = {}
    problems: list[Problem] = []
    for name, model in section_models().items():
        known = {key: value for key, value in given[name].items() if key in model.model_fields}
        problems += [unknown_key(name, key, value) for key, value in given[name].items() if key not in known]
        try:
            sections[name] = model.model_validate(known)
        except ValidationError as error:
            keys = list(dict.fromkeys(str(fault["loc"][0]) for fault in error.errors(include_url=False)))
            problems += [wrong_value(key_specs()[f"{name}.{key}"], known) for key in keys]
            sections[name] = model.model_construct(**{key: known[key] for key in known if key not in keys})
    wrong = wrong | {problem.path for problem in problems}
    problems += broken_rules(lambda path: getattr(sections[path.split(".")[0]], path.split(".")[1]), wrong)
    if contradictions is not None:
        wrong = wrong | {problem.path for problem in problems}
        # mypy sees one type for all sections; each was made by the model of its name.
        partial = RunConfig.model_construct(**sections)  # type: ignore[arg-type]
        problems += [problem for problem in contradictions(partial) if problem.path not in wrong]
    return (None if problems else RunConfig.model_validate(sections)), problems
