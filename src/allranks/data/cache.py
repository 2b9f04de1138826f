"""Tokenised sets on disk: flat little-endian arrays and a JSON file, read by memory mapping.

An entry is a folder ``<cache>/tokens/<key>/`` that appears by one rename, complete. Nothing in it is pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks import environment
from allranks.data.tokens import FlatTokens
from allranks.errors import Problem, ProblemsError, UserError

CACHE_VERSION = 1
"""Part of every key: raise it when samples become other tokens than before, or when the layout changes."""

_META = "meta.json"
_ARRAYS = {"ids": "<i4", "targets": "u1", "lengths": "<i8", "rows": "<i8", "labels": "<i8"}
"""The arrays of an entry and their types; ``labels`` is empty without classes."""

_CONTENT = ("ids", "targets", "lengths", "labels")
"""The arrays that make up the content; where in the file a sample stood is none of it."""

_ABANDONED_S = 86_400
"""Age at which a folder that a killed process was writing is removed."""


@dataclass(frozen=True, kw_only=True)
class CachedSet:
    """An entry.

    Attributes:
        flat: its samples.
        format: of the samples.
        bad: line or row, and why it is no sample.
        raw_labels: what the label indices of `flat` mean.
    """

    flat: FlatTokens
    format: str
    bad: tuple[tuple[int, str], ...]
    raw_labels: tuple[str | int, ...]


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/allranks``, or ``~/.cache/allranks``.

    Raises:
        UserError: there is neither.
    """
    base = environment.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "allranks"
    except RuntimeError:
        raise UserError(
            "there is no place for the cache of tokenised data: neither XDG_CACHE_HOME nor HOME is set, and this user "
            "has no home\n    fix: set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def entry_dir(cache_dir: Path, settings: Mapping[str, object]) -> Path:
    """The folder of the entry that `settings` name: content, tokenizer, format and all else that decides tokens."""
    key = json.dumps({"cache_version": CACHE_VERSION, **settings}, sort_keys=True)
    return cache_dir / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:32]


def read_entry(folder: Path) -> CachedSet | None:
    """The entry in `folder`, or None where there is none.

    Raises:
        ValueError: what is there is not a whole entry: cut short, damaged, or of another version.
    """
    if not folder.exists():
        return None
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        arrays = {name: _mapped(folder / name, kind, meta["arrays"][name]) for name, kind in _ARRAYS.items()}
        if len(arrays["ids"]) != int(arrays["lengths"].sum()) or len(arrays["ids"]) != len(arrays["targets"]):
            raise ValueError("its arrays do not fit together")
        return CachedSet(
            flat=FlatTokens(
                ids=arrays["ids"],
                targets=arrays["targets"],
                lengths=np.array(arrays["lengths"], dtype=np.int64),
                rows=np.array(arrays["rows"], dtype=np.int64),
                labels=np.array(arrays["labels"], dtype=np.int64) if meta["raw_labels"] else None,
                content=_content_hash(meta["arrays"], meta["raw_labels"]),
            ),
            format=meta["format"],
            bad=tuple((int(number), str(reason)) for number, reason in meta["bad"]),
            raw_labels=tuple(meta["raw_labels"]),
        )
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _mapped(path: Path, kind: str, sha256: str) -> NDArray[Any]:
    size = path.stat().st_size
    if size == 0:
        array: NDArray[Any] = np.zeros(0, dtype=kind)
    else:
        array = np.memmap(path, dtype=kind, mode="r")
    if hashlib.sha256(array.data).hexdigest() != sha256:
        raise ValueError(f"{path.name} is damaged")
    return array


def _content_hash(arrays: Mapping[str, str], raw_labels: Sequence[str | int]) -> str:
    return hashlib.sha256(json.dumps([[arrays[name] for name in _CONTENT], list(raw_labels)]).encode()).hexdigest()


class EntryWriter:
    """Writes one entry, sample by sample, into a folder of its own that `commit` puts in place.

    Several processes may write the same entry at once: one of them puts it in place, all of them read it.
    """

    def __init__(self, folder: Path) -> None:
        """Begin an entry that will be `folder`.

        Raises:
            ProblemsError: the cache can't be written.
        """
        self._folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            self._making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._files = {name: (self._making / name).open("wb") for name in _ARRAYS}
        self._hashes = {name: hashlib.sha256() for name in _ARRAYS}
        self._bad: list[tuple[int, str]] = []
        self._raw_labels: dict[str | int, int] = {}

    def _remove_abandoned(self) -> None:
        for path in self._folder.parent.glob(f"{self._folder.name}.*"):
            with suppress(OSError):  # another process may be removing it too
                written = max(file.stat().st_mtime for file in (path, *path.iterdir()))
                if time.time() - written > _ABANDONED_S:
                    shutil.rmtree(path)

    def add(
        self,
        rows: Sequence[int],
        ids: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        labels: Sequence[str | int | None],
    ) -> None:
        """Append samples; `labels` are None without classes.

        Raises:
            ProblemsError: the cache can't be written, for want of space say.
        """
        columns: dict[str, Sequence[int]] = {
            "ids": [token for sample in ids for token in sample],
            "targets": [target for sample in targets for target in sample],
            "lengths": [len(sample) for sample in ids],
            "rows": rows,
            "labels": [
                self._raw_labels.setdefault(label, len(self._raw_labels)) for label in labels if label is not None
            ],
        }
        try:
            for name, values in columns.items():
                block = np.array(values, dtype=_ARRAYS[name]).tobytes()
                self._files[name].write(block)
                self._hashes[name].update(block)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def add_bad(self, row: int, reason: str) -> None:
        """Note a row that is no sample, and why."""
        self._bad.append((row, reason))

    def commit(self, found: str) -> CachedSet:
        """Put the entry in place and read it back; `found` is the format of its samples.

        Raises:
            ProblemsError: the cache can't be written.
        """
        meta = {
            "cache_version": CACHE_VERSION,
            "format": found,
            "arrays": {name: digest.hexdigest() for name, digest in self._hashes.items()},
            "raw_labels": list(self._raw_labels),
            "bad": self._bad,
        }
        try:
            for file in self._files.values():
                file.close()
            (self._making / _META).write_text(json.dumps(meta), encoding="utf-8")
            entry = self._put_in_place()
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        assert entry is not None
        return entry

    def _put_in_place(self) -> CachedSet | None:
        """Rename the folder to its place; where another process was first, its whole entry is as good as ours."""
        try:
            self._making.rename(self._folder)
        except OSError:
            if not self._folder.exists():
                raise
            with suppress(ValueError):
                return read_entry(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._making.rename(self._folder)
        return read_entry(self._folder)

    def abandon(self) -> None:
        """Remove what `commit` did not put in place."""
        for file in self._files.values():
            with suppress(OSError):  # closing writes what is buffered, which a full disk refuses again
                file.close()
        shutil.rmtree(self._making, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> ProblemsError:
    message = f"the cache of tokenised sets can't be written: {error.strerror or error}"
    fix = "make room or set XDG_CACHE_HOME to a folder that can be written"
    return ProblemsError("data", [Problem(path=str(folder.parent), message=message, fix=fix)])
