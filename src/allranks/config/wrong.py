"""Keys that do not exist and values that are not valid: what was probably meant."""

from __future__ import annotations

from typing import Any

from allranks.config.document import read_value, shown
from allranks.config.fields import KeySpec, key_specs, nearest, section_models
from allranks.config.words import foreign_word
from allranks.errors import Problem

_KEY_LIKENESS = 0.7


def unknown_key(section: str | None, key: str, value: object) -> Problem:
    """The problem of a key that the schema does not have.

    Args:
        section: where it stands; None: at the top level.
        key: its name.
        value: what it was given.
    """
    path = key if section is None else f"{section}.{key}"
    elsewhere = [spec.path for spec in key_specs().values() if spec.name == key]
    if elsewhere:
        return Problem(
            path=path,
            message=f"is in the wrong place, with the value {shown(value)}",
            nearest=elsewhere[0],
            fix=f"move it into the section `{elsewhere[0].split('.')[0]}`",
        )
    word = foreign_word(key)
    if word is not None:
        with_value = "" if word.secret else f", with the value {shown(value)}"
        return Problem(
            path=path,
            message=f"belongs to {word.tool}, not into this file{with_value}",
            nearest=word.key,
            fix=word.instead,
        )
    near = _nearest_key(section, key)
    siblings = [spec.name for spec in key_specs().values() if spec.section == section] or list(section_models())
    return Problem(
        path=path,
        message=f"is not a key of allranks, with the value {shown(value)}",
        choices=() if near is not None else tuple(siblings),
        nearest=near,
        fix=None if near is not None else "remove it",
    )


def _nearest_key(section: str | None, key: str) -> str | None:
    """Dotted path of the nearest key: of the section itself, else of any; or the nearest section."""
    specs = key_specs().values()
    if section is not None:
        near = nearest(key, [spec.name for spec in specs if spec.section == section], _KEY_LIKENESS)
        if near is not None:
            return f"{section}.{near}"
    elif "." in key:
        return nearest(key, key_specs(), _KEY_LIKENESS)
    elif (near := nearest(key, section_models(), _KEY_LIKENESS)) is not None:
        return near
    name = nearest(key, [spec.name for spec in specs], _KEY_LIKENESS)
    return next((spec.path for spec in specs if spec.name == name), None)


_SWITCH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def wrong_value(spec: KeySpec, given: dict[str, Any]) -> Problem:
    """The problem of a key that is missing, or whose value is not one that it takes.

    Args:
        spec: the key.
        given: all keys of its section.
    """
    if spec.name not in given:
        return Problem(path=spec.path, message=f"is missing. {spec.description}", fix=f"add it to `{spec.section}:`")
    value = given[spec.name]
    word = _SWITCH_WORDS.get(str(value).lower(), str(value).lower())
    near = nearest(word, spec.choices)
    return Problem(
        path=spec.path,
        message=f"{shown(value)} is not {'valid' if spec.closed else spec.takes}",
        choices=spec.choices if spec.closed else (),
        nearest=near,
        fix=_fix_of_value(spec, value) if near is None else None,
    )


def _fix_of_value(spec: KeySpec, value: object) -> str | None:
    """How the value was probably meant, where it is of the wrong kind."""
    if value is None:
        return "leave the key out for its default"
    if "null" in spec.takes and (value == -1 or str(value).lower() == "none"):
        return "write null, or leave the key out"
    if isinstance(value, str):
        if "a list" in spec.takes:
            return f"write a list: [{', '.join(value.replace(',', ' ').split())}]"
        if not spec.closed and isinstance(read_value(value)[0], int | float):
            return "write it without quotes"
    elif isinstance(value, int | float) and "a text" in spec.takes:
        return "put it in quotes"
    return None
