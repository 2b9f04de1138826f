"""One JSON-lines file per rank: what happened, in a versioned schema.

Every line has ``v`` (schema version), ``time`` (Unix seconds), ``rank``, ``launch``, ``generation`` (restarts of the
ranks within the launch) and ``kind``;
the other fields belong to the kind and are listed in `KINDS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import Any, TextIO

EVENTS_VERSION = 3
EVENTS_DIR = "events"

KINDS: dict[str, tuple[str, ...]] = {
    "launch": ("world_size", "profile", "device", "versions"),
    "note": ("message",),
    "data": ("samples", "eval_samples", "max_length", "truncated", "skipped"),
    "model": ("parameters", "trainable", "base_bytes", "attention", "padding_free", "loss"),
    "resume": ("step", "epoch", "consumed", "checkpoint"),
    "step": (
        "step",
        "epoch",
        "sample_ids",
        "skipped_samples",
        "micro_batches",
        "target_tokens",
        "loss",
        "grad_norm",
        "seconds",
        "caps",
    ),
    "caps": ("step", "reason", "message", "caps"),
    "cost": ("step", "a", "b", "c", "error"),
    "log": ("step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_bytes", "reserved_bytes"),
    "failure": (
        "step",
        "phase",
        "failure",
        "message",
        "attempt",
        "sample_ids",
        "tokens",
        "bytes_asked",
        "bytes_free",
    ),
    "retry": (
        "step",
        "attempt",
        "phase",
        "failed_rank",
        "message",
        "caps",
        "gradient_checkpointing",
        "skipped_samples",
    ),
    "respawn": (
        "step",
        "phase",
        "failure",
        "failed_rank",
        "message",
        "caps",
        "gradient_checkpointing",
        "skipped_samples",
        "resumed_step",
        "abandoned_steps",
        "used",
        "max_respawns",
    ),
    "skipped_step": ("step", "reason"),
    "eval": ("step", "loss", "samples", "target_tokens", "seconds"),
    "save": ("step", "path", "seconds", "blocked_s", "bytes"),
    "stop": ("step", "reason", "message"),
    "finish": ("step", "seconds", "adapter"),
}
"""The kinds of event and the fields that each has besides the common ones."""


_COMMON = ("v", "time", "rank", "launch", "generation", "kind")


class EventLog:
    """Appends events of one rank; each line is written and flushed at once."""

    def __init__(self, run_dir: Path, rank: int, launch: int, generation: int = 0) -> None:
        folder = run_dir / EVENTS_DIR
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank}.jsonl"
        cut_by_a_kill = path.exists() and not _ends_a_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        if cut_by_a_kill:
            self._file.write("\n")
        self._place = {"rank": rank, "launch": launch, "generation": generation}
        self._said = False

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event.

        Raises:
            ValueError: the kind is unknown or its fields are not those of `KINDS`: a fault of ours.
        """
        if kind not in KINDS or set(fields) != set(KINDS[kind]):
            raise ValueError(f"event {kind!r} with fields {sorted(fields)} does not match {KINDS.get(kind)}")
        common = {"v": EVENTS_VERSION, "time": time.time(), **self._place, "kind": kind}
        try:
            self._file.write(json.dumps({**common, **fields}) + "\n")
        except OSError as error:
            # The record is not worth the run; the next save will say whether the run can go on.
            if not self._said:
                print(f"events are lost, {self._file.name}: {error.strerror}", file=sys.stderr)
            self._said = True

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        with suppress(OSError):  # of what a full disk has refused before
            self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, SEEK_END) == 0:
            return True
        file.seek(-1, SEEK_END)
        return file.read() == b"\n"


def read_events(run_dir: Path, rank: int = 0) -> Iterator[dict[str, Any]]:
    """The events of one rank, oldest first; lines that a kill or a bad disk left incomplete are left out."""
    path = run_dir / EVENTS_DIR / f"rank{rank}.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and line.strip():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # a kill cut the line; the next launch appended after it
                if _is_whole(event):
                    yield event


def _is_whole(event: object) -> bool:
    return isinstance(event, dict) and {*_COMMON, *KINDS.get(str(event.get("kind")), ())} <= event.keys()
