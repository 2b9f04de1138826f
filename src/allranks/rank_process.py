"""What a rank does to its own process at the very start, before anything heavy is imported."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.rundir import share_lock

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PARENT_POLL_S = 1.0


def redirect_output(log: Path) -> None:
    """Append this process's stdout and stderr to `log`, at the level of file descriptors.

    What native code prints while it crashes lands there too, and so does the output of child processes. While one of
    these processes lives, the log is locked, so that no second launch starts in the run directory.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    share_lock(descriptor)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        TextIOWrapper(
            BufferedWriter(_Log(number, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for number in (1, 2)
    )


class _Log(FileIO):
    """What a full disk has no room for is lost, and is no failure of whoever prints, ours or a library.

    The next save says that the disk is full.
    """

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def follow_parent(grace_s: float) -> None:
    """End this process when the process that started it is gone, so that no rank is ever left alone.

    A thread watches the parent's id. When it changes, the thread sends this process SIGINT, which saves and leaves,
    and `grace_s` seconds later SIGKILL.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        print(f"the process that started this rank (pid {parent}) is gone: leaving", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
