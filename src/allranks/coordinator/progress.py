"""Where each rank is, on a page of shared memory that outlives the process: who dies without a word is still known.

A page is a small file that its rank maps into memory. Writing costs a few microseconds and no system call; the
kernel keeps the page when the process is killed.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from allranks.rundir import launch_log_path

PROGRESS_DIR = "progress"
_PAGE_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where one rank was.

    Attributes:
        pid: process id.
        log_bytes: size of the rank's log when the process started: what follows is its own.
        committed_step: last optimizer step made.
        step: optimizer step that was being tried.
        phase: where in it, e.g. ``backward``.
        samples: samples in the micro-batch under way; 0 outside one.
        tokens: its tokens, padding included.
        left: why the rank left by itself; None while it runs, and of one that died without a word.
    """

    pid: int
    log_bytes: int = 0
    committed_step: int = 0
    step: int = 0
    phase: str = "start"
    samples: int = 0
    tokens: int = 0
    left: str | None = None


class ProgressPage:
    """One rank's page. A disk that refuses it costs only this knowledge.

    Attributes:
        now: what it says.
    """

    def __init__(self, run_dir: Path, rank: int, *, launch: int, generation: int) -> None:
        self._map: mmap.mmap | None = None
        self.now = Progress(
            pid=os.getpid(),
            log_bytes=_size(launch_log_path(run_dir, launch, rank)),
        )
        path = _path(run_dir, launch, generation, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The page of the generation before is what rank 0 reads now; older ones nobody needs.
            _path(run_dir, launch, generation - 2, rank).unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                # Blocks, not a hole: a write to a page that the full disk can't back would be a SIGBUS.
                os.posix_fallocate(descriptor, 0, _PAGE_BYTES)
                self._map = mmap.mmap(descriptor, _PAGE_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            return
        self._write()

    def at(self, phase: str, *, committed_step: int, step: int, samples: int = 0, tokens: int = 0) -> None:
        """This rank has entered `phase`."""
        self.now = replace(
            self.now, committed_step=committed_step, step=step, phase=phase, samples=samples, tokens=tokens
        )
        self._write()

    def leave(self, why: str) -> None:
        """This rank is about to leave by itself; the first word stays."""
        if self.now.left is None:
            self.now = replace(self.now, left=why)
            self._write()

    def _write(self) -> None:
        if self._map is not None:
            text = json.dumps(asdict(self.now)).encode()
            self._map[: len(text) + 1] = text + b"\n"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _path(run_dir: Path, launch: int, generation: int, rank: int) -> Path:
    return run_dir / PROGRESS_DIR / f"L{launch:04d}-g{generation}-rank{rank}"


def read_pages(run_dir: Path, *, launch: int, generation: int) -> dict[int, Progress]:
    """By rank, the pages of one generation; what can't be read, or was cut while it was written, is left out."""
    found = {}
    prefix = f"L{launch:04d}-g{generation}-rank"
    for path in (run_dir / PROGRESS_DIR).glob(f"{prefix}*"):
        try:
            line, _, _ = path.read_bytes().partition(b"\n")
            found[int(path.name.removeprefix(prefix))] = Progress(**json.loads(line))
        except (OSError, ValueError, TypeError):
            continue
    return dict(sorted(found.items()))
