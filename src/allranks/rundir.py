"""What lies where in a run directory, and the small files through which launcher and ranks speak."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from allranks.errors import UserError

LAUNCH_LOCK = "launch.lock"
STOP_REQUEST = "stop.request"
LOGS_DIR = "logs"

_TRIES = 5
_PAUSE_S = 0.05


def launch_log_dir(run_dir: Path, launch: int) -> Path:
    """Folder of the logs of one launch, e.g. ``logs/launch-0001``."""
    return run_dir / LOGS_DIR / f"launch-{launch:04d}"


def launch_log_path(run_dir: Path, launch: int, rank: int) -> Path:
    """Where stdout and stderr of one rank go; restarts of the same launch append."""
    return launch_log_dir(run_dir, launch) / f"rank{rank}.log"


def injected_dir(run_dir: Path, launch: int) -> Path:
    """Where the faults of a drill are noted just before they happen: ``NUMBER-TIME``, both in the order of asking."""
    return run_dir / "injected" / f"L{launch:04d}"


def next_launch(run_dir: Path) -> int:
    """Number of the next launch, from 1: one more than the highest that has a log folder."""
    numbers = [0]
    for folder in (run_dir / LOGS_DIR).glob("launch-*"):
        _, _, digits = folder.name.rpartition("-")
        if digits.isdecimal():
            numbers.append(int(digits))
    return max(numbers) + 1


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a kill at any instant, sees the old one or the new one whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def request_stop(run_dir: Path, reason: str) -> None:
    """Ask all ranks to save at the next step boundary and leave."""
    replace_text(run_dir / STOP_REQUEST, json.dumps({"reason": reason, "time": time.time()}) + "\n")


def stop_requested(run_dir: Path) -> str | None:
    """The reason of a pending stop request, e.g. ``SIGTERM``; None without one.

    A file without a reason counts too: a person made it with `touch`, or is just writing it.
    """
    try:
        text = (run_dir / STOP_REQUEST).read_text(encoding="utf-8", errors="replace")
    except OSError:  # it isn't there, or a shared file system hiccups, which must not end a run
        return None
    try:
        return str(json.loads(text)["reason"])
    except (ValueError, TypeError, KeyError):
        return STOP_REQUEST


def discard_stop_request(run_dir: Path) -> None:
    """Remove the stop request of an earlier launch."""
    (run_dir / STOP_REQUEST).unlink(missing_ok=True)


@contextmanager
def launch_lock(run_dir: Path) -> Iterator[str | None]:
    """Hold the run directory for the life of one launcher; the kernel frees it when the process dies.

    Yields:
        A word to say if the file system has no locks, so that nothing keeps a second launch away.

    Raises:
        UserError: another launcher holds it, ranks of a killed launcher are still in it, or it can't be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Append mode: opening must not wipe the holder's name before we know whether it still holds the lock.
        file = (run_dir / LAUNCH_LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(f"the run directory {run_dir}", error) from error
    with file:
        word = None
        try:
            _take(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"{run_dir}: in use by a live launch ({holder})\n"
                "    fix: wait for it, stop it with Ctrl-C or kill -TERM, or give this run another --name"
            ) from None
        except OSError as error:  # Lustre mounted without flock, for one
            word = f"{run_dir} can't be locked ({error.strerror}): don't start this run twice at the same time"
        if _ranks_alive(run_dir):
            raise UserError(
                f"{run_dir}: ranks of an earlier launch, whose launcher was killed, are still saving and leaving\n"
                "    fix: wait a minute, or give this run another --name"
            )
        try:
            file.truncate(0)
            # Past the buffer: what a full disk refuses would be tried again, and fail again, when the file is closed.
            os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise unwritable(f"the run directory {run_dir}", error) from error
        yield word


def unwritable(what: str, error: OSError) -> UserError:
    """The error for a part of the run directory that can't be written before anything has started."""
    room = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return UserError(f"{what} can't be written: {error.strerror}\n    fix: {room}give another output.dir")


def _take(file: TextIO) -> None:
    # `is_held` of another process takes the lock for an instant.
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE_S)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(run_dir: Path) -> bool:
    """Whether a live launcher, or ranks whose launcher was killed, are in the run directory."""
    return _locked(run_dir / LAUNCH_LOCK) or _ranks_alive(run_dir)


def launcher_lives(run_dir: Path) -> bool:
    """Whether a launcher holds the run directory; False too where the file system has no locks."""
    return _locked(run_dir / LAUNCH_LOCK)


def share_lock(descriptor: int) -> None:
    """Mark an open log as in use for as long as this process, or a child that writes to it, lives."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _ranks_alive(run_dir: Path) -> bool:
    return any(_locked(log) for log in launch_log_dir(run_dir, next_launch(run_dir) - 1).glob("rank*.log"))


def _locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it isn't there, or its file system has no locks
        return False
    return False
