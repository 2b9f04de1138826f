"""Which checkpoints of a run count: those that ``latest.json`` lists; where it can't be read, those that lie there.

Until it is published, a checkpoint lies in a folder whose name ends in `UNFINISHED`. So a folder without that ending
was whole once, and one that is not whole now was damaged: a kill can't leave it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpoints.durable import FileRecord, sha256_of
from allranks.checkpoints.state import CheckpointRef

POINTER_FILE = "latest.json"
POINTER_VERSION = 1
STATE_FILE = "state.json"
UNFINISHED = ".unfinished"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What ``checkpoints/`` says of itself.

    Attributes:
        refs: the checkpoints that count, newest first.
        words: what is wrong, one line each.
        dropped: names of folders that counted and are to be removed.
        by_pointer: ``latest.json`` could be read, and `refs` and `dropped` are from it.
    """

    refs: tuple[CheckpointRef, ...]
    words: tuple[str, ...]
    dropped: frozenset[str] = frozenset()
    by_pointer: bool = False


def published(folder: Path, *, own: Collection[str]) -> Published:
    """What counts in `folder`, which need not exist.

    Args:
        folder: ``checkpoints/`` of a run.
        own: names of the folders that this process writes just now; they are left out.
    """
    pointer_file = folder / POINTER_FILE
    try:
        pointer = json.loads(pointer_file.read_bytes())
        if pointer["pointer_version"] != POINTER_VERSION:
            raise ValueError(f"pointer version {pointer['pointer_version']}")
        refs = tuple(CheckpointRef.from_dict(entry) for entry in (pointer, *pointer["older"]))
        dropped = frozenset(str(name) for name in pointer.get("dropped", ()))
        return Published(refs=refs, words=(), dropped=dropped, by_pointer=True)
    except FileNotFoundError:
        word, missing = f"{pointer_file} is missing", True
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        word, missing = f"{pointer_file} is not readable: {error!r}", False
    found = unlisted(folder, own)
    if missing and not found.refs and not found.words:
        return found
    return Published(refs=found.refs, words=(word, *found.words))


def pointer_content(ref: CheckpointRef, older: list[CheckpointRef], dropped: list[str]) -> bytes:
    """The content of ``latest.json``."""
    pointer = {
        "pointer_version": POINTER_VERSION,
        **ref.to_dict(),
        "older": [other.to_dict() for other in older],
        "dropped": dropped,
    }
    return json.dumps(pointer, indent=1).encode()


def unlisted(folder: Path, left_out: Collection[str]) -> Published:
    """The checkpoints that lie in `folder` under other names than `left_out`, those that were never published last."""
    try:
        names = [name for name in checkpoint_names(folder) if name not in left_out]
    except OSError as error:
        return Published(refs=(), words=(f"{folder} can't be listed: {error.strerror}",))
    complete: list[tuple[bool, int, int, CheckpointRef]] = []
    words = []
    for name in names:
        never_published = name.endswith(UNFINISHED)
        found = described(folder / name)
        if isinstance(found, CheckpointRef):
            written_ns = (folder / name / STATE_FILE).stat().st_mtime_ns
            complete.append((not never_published, found.step, written_ns, found))
        elif not never_published:
            words.append(f"checkpoint {name} is damaged: {found}")
    complete.sort(key=lambda entry: entry[:3], reverse=True)
    return Published(refs=tuple(ref for *_, ref in complete), words=tuple(sorted(words, reverse=True)))


def checkpoint_names(folder: Path) -> list[str]:
    """Names of all folders of checkpoints, finished or not.

    Raises:
        OSError: the folder can't be listed.
    """
    try:
        return [path.name for path in folder.iterdir() if path.name.startswith("step-")]
    except FileNotFoundError:
        return []


def damage(folder: Path, ref: CheckpointRef, *, checksums: bool) -> str | None:
    """What is wrong with the files of `ref` in `folder`; None if all have their size, and their content on request."""
    for name, record in ref.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.bytes:
                return f"{name} has {size} bytes, not {record.bytes}"
            if checksums and sha256_of(path) != record.sha256:
                return f"the content of {name} changed since it was written"
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
    return None


def described(folder: Path) -> CheckpointRef | str:
    """The checkpoint in `folder` by its own state file if every file has its size, else what is wrong."""
    state_file = folder / STATE_FILE
    try:
        content = state_file.read_bytes()
    except OSError as error:
        return f"{STATE_FILE} can't be read: {error.strerror}"
    try:
        told: dict[str, Any] = json.loads(content)
        files = {name: FileRecord(**record) for name, record in told["files"].items()}
        ref = CheckpointRef(step=told["state"]["step"], folder=folder.name, files=files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE_FILE} is not what was written"
    word = damage(folder, ref, checksums=False)
    if word is not None:
        return word
    files[STATE_FILE] = FileRecord(bytes=len(content), sha256=sha256_of(state_file))
    return ref
