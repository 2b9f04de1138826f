"""What each key of the schema takes, in words: for error messages and the reference page."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from allranks.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class KeySpec:
    """One key of `run.yaml`.

    Attributes:
        section: e.g. ``training``.
        name: e.g. ``learning_rate``.
        description: its meaning and unit.
        takes: what its value may be, in words.
        choices: the values that can be listed.
        closed: nothing but `choices` is valid.
        default: its value where it is left out.
        required: it can't be left out.
    """

    section: str
    name: str
    description: str
    takes: str
    choices: tuple[str, ...]
    closed: bool
    default: Any
    required: bool

    @property
    def path(self) -> str:
        """Dotted path."""
        return f"{self.section}.{self.name}"


def section_models() -> dict[str, type[BaseModel]]:
    """The model of each section, in the order of the schema."""
    return {
        name: info.annotation
        for name, info in RunConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


@functools.cache
def key_specs() -> dict[str, KeySpec]:
    """Every key of the schema by its dotted path, in order."""
    specs = [
        _spec(section, name, info)
        for section, model in section_models().items()
        for name, info in model.model_fields.items()
    ]
    return {spec.path: spec for spec in specs}


def _spec(section: str, name: str, info: FieldInfo) -> KeySpec:
    words = _words(info.annotation, info.metadata)
    choices = _choices(info.annotation)
    return KeySpec(
        section=section,
        name=name,
        description=info.description or "",
        takes=words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}",
        choices=tuple(choices),
        closed=bool(choices) and len(choices) == len(words),
        default=None if info.is_required() else info.get_default(call_default_factory=True),
        required=info.is_required(),
    )


_KINDS = {int: "an integer", float: "a number", types.NoneType: "null"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _words(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    """The alternatives that a value of this type may be."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        null_last = sorted(args, key=lambda arg: arg is types.NoneType)
        return [word for arg in null_last for word in _words(arg, metadata)]
    if origin is Annotated:
        return _words(args[0], [bound for info in args[1:] for bound in info.metadata])
    if origin is Literal or annotation is bool:
        return _choices(annotation)
    if origin is list:
        return ["a list of texts"]
    if annotation is str:
        return ["a text that is not empty" if any(hasattr(bound, "min_length") for bound in metadata) else "a text"]
    bounds = [
        f"{word} {_number(getattr(b, sign))}" for b in metadata for sign, word in _BOUNDS.items() if hasattr(b, sign)
    ]
    return [" ".join([_KINDS[annotation], " and ".join(bounds if annotation in (int, float) else [])]).strip()]


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _choices(annotation: Any) -> list[str]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (Union, types.UnionType):
        return [choice for arg in args for choice in _choices(arg)]
    return ["true", "false"] if annotation is bool else []


def nearest(word: str, candidates: Iterable[str], likeness: float = 0.6) -> str | None:
    """The candidate that `word` was probably meant to be, if one is near.

    Args:
        word: as the user wrote it.
        candidates: what is valid.
        likeness: least `difflib` ratio, from 0 to 1.
    """
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=likeness)
    return close[0] if close else None
