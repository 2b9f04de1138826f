"""Values that name a file, a folder or a repository of the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from allranks.config.document import shown
from allranks.config.fields import nearest
from allranks.errors import Problem

PATH_KEYS = ("model.name_or_path", "model.tokenizer_name_or_path", "data.train", "data.eval")
"""Keys whose value is a file, a folder or a hub id."""

_FILE_SUFFIXES = {
    ".jsonl",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".txt",
    ".gz",
    ".zst",
    ".gguf",
    ".safetensors",
}
_STEM_LIKENESS = 0.7
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_paths(
    given: dict[str, dict[str, Any]], folder: Path, from_command_line: Collection[str]
) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """`given` with existing files and folders as absolute paths.

    Args:
        given: keys of each section.
        folder: where relative paths start.
        from_command_line: keys whose relative paths start at the working directory instead.
    """
    resolved, problems = {section: dict(keys) for section, keys in given.items()}, []
    for path in PATH_KEYS:
        section, key = path.split(".")
        value = given[section].get(key)
        if not isinstance(value, str) or not value:
            continue
        base, start = folder, "the folder of the configuration file"
        if path in from_command_line:
            base, start = Path.cwd(), "the working directory"
        # Path.resolve would follow a symbolic link, and with it lose the suffix that tells the kind of file.
        place = Path(os.path.abspath(base / expanded(value)))  # noqa: PTH100
        if _exists(place):
            resolved[section][key] = str(place)
        elif _looks_like_a_path(value):
            siblings = [entry.name for entry in place.parent.iterdir()] if _exists(place.parent) else []
            problems.append(
                Problem(
                    path=path,
                    message=f"{shown(value)} does not exist: there is no {place}",
                    nearest=nearest_name(place.name, siblings),
                    fix=f"give a path from {start}, an absolute path, or a hub id",
                )
            )
    return resolved, problems


def nearest_name(name: str, siblings: list[str]) -> str | None:
    """The file with a similar stem; endings alone make no file similar to another."""
    by_stem = {
        Path(sibling).stem: sibling for sibling in sorted(siblings, key=lambda s: Path(s).suffix == Path(name).suffix)
    }
    stem = nearest(Path(name).stem, by_stem, _STEM_LIKENESS)
    return None if stem is None else by_stem[stem]


def expanded(value: str) -> Path:
    """`value` as a path, its ``~`` replaced where that user is known."""
    try:
        return Path(value).expanduser()
    except RuntimeError:  # the home of an unknown user
        return Path(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission, or a name that is too long
        return False


def _looks_like_a_path(value: str) -> bool:
    return (
        value.startswith((".", "/", "~"))
        or Path(value).suffix.lower() in _FILE_SUFFIXES
        or _HUB_ID.fullmatch(value) is None
    )
