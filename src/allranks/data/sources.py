"""Where samples come from: a file, a folder saved by `datasets`, or a set on the hub."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from allranks.config.paths import expanded, nearest_name
from allranks.data.files import Reader, csv_rows, json_rows, jsonl_rows, parquet_reader
from allranks.errors import Problem, ProblemsError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")

_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+(?::[\w.+-]+)?")
_COLUMNS_FROM_ROWS = 100
"""Rows whose keys are taken for the columns of a JSON file, which declares none."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One set, before it is tokenised.

    Attributes:
        name: as the user wrote it.
        unit: what `rows` counts.
        content: fingerprint of the content.
        size: rows, or an upper bound of them.
        columns: their names.
        class_names: for each column that declares classes (a ClassLabel), their names in order.
        rows: reads the set from the start; raises ProblemsError where it is corrupt, naming up to 20 lines.
    """

    name: str
    unit: Literal["line", "row"]
    content: str
    size: int
    columns: tuple[str, ...]
    rows: Reader
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def open_source(name: str, *, split: str, key: str) -> Source:
    """Find the set that `name` means.

    Args:
        name: file, folder or hub id (``owner/set``, or ``owner/set:configuration``).
        split: of a hub id or saved DatasetDict.
        key: configuration key that `name` was given under; ``<key>_split`` is that of `split`.

    Raises:
        ProblemsError: there is no such set, it is empty, or it is corrupt.
    """
    path = expanded(name)
    if name == "-" or "://" in name or (path.exists() and not path.is_file() and not path.is_dir()):
        message = (
            f"{name!r} is a stream, which has no fingerprint and no end to count: the order would not be repeatable"
        )
        raise _refused(key, message, fix="save it to a file first")
    if path.is_file():
        source = _file(name, path, key)
    elif path.is_dir():
        source = _saved(name, path, split, key)
    elif path.suffix in SUFFIXES or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise _refused(key, f"there is no file or folder {name!r}", nearest=_nearest_file(path))
    else:
        source = _hub(name, split, key)
    if source.size == 0 or not source.columns:
        raise _refused(key, f"{name} holds no sample: no row, or none with columns")
    return source


def _refused(key: str, message: str, **hints: Any) -> ProblemsError:
    return ProblemsError("data", [Problem(path=key, message=message, **hints)])


def _nearest_file(path: Path) -> str | None:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = nearest_name(path.name, names)
    return None if near is None else str(folder / near)


def _file(name: str, path: Path, key: str) -> Source:
    if path.suffix not in SUFFIXES:
        raise _refused(key, f"{name} has no known ending", choices=SUFFIXES, fix="rename or convert the file")
    try:
        content, lines = _content_of(path)
    except OSError as error:
        raise _refused(key, f"{name} cannot be read: {error.strerror}") from error
    if path.suffix == ".parquet":
        columns, size, rows = parquet_reader(path)
        return Source(name=name, unit="row", content=content, size=size, columns=columns, rows=rows)
    if path.suffix == ".csv":
        columns, csv_reader = csv_rows(path)
        size = 0 if next(csv_reader(()), None) is None else lines
        return Source(name=name, unit="line", content=content, size=size, columns=columns, rows=csv_reader)
    if path.suffix == ".json" and _is_array(path):
        size, array_reader = json_rows(path)
        columns = _keys(array_reader)
        return Source(name=name, unit="row", content=content, size=size, columns=columns, rows=array_reader)
    reader = jsonl_rows(path)
    return Source(name=name, unit="line", content=content, size=lines, columns=_keys(reader), rows=reader)


def _keys(reader: Reader) -> tuple[str, ...]:
    """The keys of the first rows: JSON declares no columns."""
    rows = islice(reader(()), _COLUMNS_FROM_ROWS)
    return tuple(dict.fromkeys(column for _, row in rows if isinstance(row, dict) for column in row))


def _content_of(path: Path) -> tuple[str, int]:
    """SHA-256 of a file, and its lines."""
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
    return f"sha256:{digest.hexdigest()}", lines + (last != b"\n")


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _saved(name: str, path: Path, split: str, key: str) -> Source:
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        message = f"the folder {name} was not saved by `datasets`: it has neither state.json nor dataset_dict.json"
        raise _refused(key, message, fix="name a file in it, or save it with save_to_disk")
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever pyarrow, json or datasets make of a damaged folder
        raise _refused(key, f"{name} cannot be read: {_first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise _unknown_split(name, split, tuple(loaded), key)
        loaded = loaded[split]
    return _from_datasets(name, loaded)


def _hub(name: str, split: str, key: str) -> Source:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None, split=split)
    except Exception as error:  # not found, offline, gated, no such configuration or split: datasets says which
        message = f"{name!r} is no file or folder here, and the hub gave no set of that id: {_first_line(error)}"
        fix = f"check the id, the split ({key}_split: {split}) and the network; a configuration is named as id:name"
        raise _refused(key, message, fix=fix) from error
    return _from_datasets(name, loaded)


def _unknown_split(name: str, split: str, splits: tuple[str, ...], key: str) -> ProblemsError:
    near = difflib.get_close_matches(split, splits, n=1)
    return _refused(f"{key}_split", f"{name} has no split {split!r}", choices=splits, nearest=near[0] if near else None)


def _from_datasets(name: str, loaded: Any) -> Source:
    """A source of a `datasets.Dataset`."""

    def rows(columns: tuple[str, ...]) -> Iterator[tuple[int, object]]:
        number = 0
        try:
            for block in loaded.select_columns(list(columns)).iter(1000):
                for values in zip(*block.values(), strict=True):
                    number += 1
                    yield number, dict(zip(block, values, strict=True))
        except Exception as error:  # a damaged Arrow file shows when its rows are read
            problem = Problem(path=f"{name}: after row {number}", message=f"cannot be read: {_first_line(error)}")
            raise ProblemsError(name, [problem]) from error

    return Source(
        name=name,
        unit="row",
        content=f"datasets:{loaded._fingerprint}:{len(loaded)}",
        size=len(loaded),
        columns=tuple(loaded.column_names),
        rows=rows,
        class_names={
            column: tuple(feature.names) for column, feature in loaded.features.items() if hasattr(feature, "names")
        },
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
