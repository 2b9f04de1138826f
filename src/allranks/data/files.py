"""Reading jsonl, json, csv and parquet files so that every fault is named by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from allranks.errors import Problem, ProblemsError

Reader = Callable[[tuple[str, ...]], Iterator[tuple[int, object]]]
"""Given the columns that are needed (a hint), yields (line or row from 1, content); content None is a blank line."""

_MOST_FAULTS = 20
"""Faults listed before the reader gives up."""

_SHOWN = 60
"""Characters shown of a faulty line."""


class _Faults:
    """The faults of one file so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: list[Problem] = []

    def add(self, line: int, message: str, fix: str | None = None) -> None:
        self.problems.append(Problem(path=f"{self._path}:{line}", message=message, fix=fix))
        if len(self.problems) == _MOST_FAULTS:
            self.raise_any()

    def raise_any(self) -> None:
        if self.problems:
            raise ProblemsError(str(self._path), self.problems)


def jsonl_rows(path: Path) -> Reader:
    """A reader of a file with one JSON value per line."""

    def rows(_columns: tuple[str, ...]) -> Iterator[tuple[int, object]]:
        faults = _Faults(path)
        blank: list[int] = []
        for number, line in _text_lines(path, faults):
            if not line.strip():
                blank.append(number)
                continue
            try:
                row = json.loads(line.rstrip("\r\n"), object_pairs_hook=_without_doubles)
            except (ValueError, RecursionError) as error:
                said = _json_fault(error) if isinstance(error, _DoubledKey) else f"not valid JSON: {_json_fault(error)}"
                faults.add(number, f"{said}: {_shown(line)}")
                continue
            if not faults.problems:  # after a fault the file is read on only to find the others
                yield from ((at, None) for at in blank)
                blank.clear()
                yield number, row
        faults.raise_any()

    return rows


def json_rows(path: Path) -> tuple[int, Reader]:
    """Rows and reader of a file that is one JSON array; it is read whole.

    Raises:
        ProblemsError: it is not valid JSON.
    """
    faults = _Faults(path)
    text = "".join(line for _, line in _text_lines(path, faults))
    faults.raise_any()
    values: list[object] = []
    try:
        values = json.loads(text, object_pairs_hook=_without_doubles)
    except _DoubledKey as error:
        faults.add(_line_of_doubled_key(text), _json_fault(error))
        faults.raise_any()
    except (ValueError, RecursionError) as error:
        faults.add(getattr(error, "lineno", 1), f"not valid JSON: {_json_fault(error)}")
        faults.raise_any()

    def rows(_columns: tuple[str, ...]) -> Iterator[tuple[int, object]]:
        yield from enumerate(values, start=1)

    return len(values), rows


def csv_rows(path: Path) -> tuple[tuple[str, ...], Reader]:
    """The columns in the header of a csv file, and its reader; a record is counted by the line it begins in.

    Raises:
        ProblemsError: the header is missing, or has empty or equal names.
    """
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than some documents
    faults = _Faults(path)
    header, _ = next(_csv_records(path, faults), ([], 0))
    faults.raise_any()
    for name in dict.fromkeys(header):
        if not name.strip() or header.count(name) > 1:
            faults.add(1, f"the header {_shown(','.join(header))} has an empty or repeated name: {name!r}")
    faults.raise_any()

    def rows(_columns: tuple[str, ...]) -> Iterator[tuple[int, object]]:
        faults = _Faults(path)
        records = _csv_records(path, faults)
        next(records, None)
        blank: list[int] = []
        for record, number in records:
            if not record:
                blank.append(number)
            elif len(record) != len(header):
                faults.add(number, f"{len(record)} fields where the header has {len(header)}: {_shown(record[0])}")
            elif not faults.problems:
                yield from ((at, None) for at in blank)
                blank.clear()
                yield number, dict(zip(header, record, strict=True))
        faults.raise_any()

    return tuple(header), rows


def _csv_records(path: Path, faults: _Faults) -> Iterator[tuple[list[str], int]]:
    """Records and the line each begins in; after a fault in quoting there is nothing to go on from."""
    reader = csv.reader((line for _, line in _text_lines(path, faults)), strict=True)
    while True:
        begins = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                faults.add(
                    begins, "a quote opened in this record is never closed", fix='write a quote in a field as ""'
                )
            else:
                faults.add(begins, f"not valid CSV: {error}")
            return
        yield record, begins


def parquet_reader(path: Path) -> tuple[tuple[str, ...], int, Reader]:
    """Columns, rows and reader of a parquet file.

    Raises:
        ProblemsError: it is not a parquet file.
    """
    # pyarrow comes without types.
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    broken = (pyarrow.ArrowException, OSError, ValueError)

    def problem(where: str, error: Exception) -> ProblemsError:
        text = str(error).strip().splitlines() or [type(error).__name__]
        message = f"not a readable parquet file: {text[0]}"
        return ProblemsError(str(path), [Problem(path=where, message=message, fix="write or download it again")])

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, size = tuple(file.schema_arrow.names), int(file.metadata.num_rows)
    except broken as error:
        raise problem(str(path), error) from error

    def rows(needed: tuple[str, ...]) -> Iterator[tuple[int, object]]:
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                blocks = file.iter_batches(1000, columns=list(needed))
                row: dict[str, Any]
                for row in chain.from_iterable(block.to_pylist() for block in blocks):
                    number += 1
                    yield number, row
        except broken as error:
            raise problem(f"{path}: after row {number}", error) from error

    return columns, size, rows


def _text_lines(path: Path, faults: _Faults) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 file, from 1, with their ends; one that is not UTF-8 is a fault, and is repaired to go on."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{raw[error.start]:02x} at position {error.start + 1}"
                faults.add(number, f"not UTF-8: {byte}", fix=f"iconv -f LATIN1 -t UTF-8 {path.name}, if it is Latin-1")
                yield number, raw.decode("utf-8", errors="replace")


class _DoubledKey(ValueError):
    """An object has a key twice; json would silently keep the last value."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DoubledKey(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in a record")
    return values


def _line_of_doubled_key(text: str) -> int:
    """The line in which the first element of a JSON array begins that has a doubled key."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_doubles)
    at = text.index("[") + 1
    while True:
        at = next(place for place in range(at, len(text)) if text[place] not in " \t\r\n,")
        try:
            _, at = decoder.raw_decode(text, at)
        except _DoubledKey:
            return text.count("\n", 0, at) + 1


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shown(line: str) -> str:
    line = line.rstrip("\r\n")
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"
