"""The processes below the launcher: finding all of them, and leaving none behind. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_POLL_S = 0.05
_KILL_WAIT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """While this holds, a descendant whose parent dies becomes our child instead of init's.

    So the tree below us is complete whatever happened to the processes in the middle (ranks have sessions of
    their own, so no process group holds them together).
    """
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """For the moment between fork and exec: have the kernel send SIGTERM when the launcher dies, even by SIGKILL.

    Only calls into the kernel, and needs a launcher without threads, as any code after a fork does.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


class Tree:
    """The descendants of this process that did not exist when the tree was created."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._root: subprocess.Popen[bytes] | None = None

    def grow_from(self, root: subprocess.Popen[bytes]) -> None:
        """Tell which process was started; its exit status is left to it."""
        self._root = root

    def alive(self) -> list[psutil.Process]:
        """All that still run, in no order; adopted ones that are dead are reaped on the way."""
        found = [process for process in psutil.Process().children(recursive=True) if process not in self._before]
        return [process for process in found if not self._dead(process)]

    def _dead(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                return False
            if self._root is not None and process.pid == self._root.pid:
                self._root.poll()
            elif process.ppid() == os.getpid():
                process.wait(timeout=0)
        return True

    def signal_ranks(self, number: signal.Signals) -> None:
        """Send a signal to all but the process that was started."""
        _send(number, [process for process in self.alive() if self._root is None or process.pid != self._root.pid])

    def ask(self, number: signal.Signals, patience_s: float, out_of_patience: Callable[[], bool]) -> None:
        """Send a signal to all and wait until they are gone, for `patience_s` seconds or as long as there is patience.

        Args:
            number: the signal.
            patience_s: in seconds.
            out_of_patience: called again and again while waiting.
        """
        deadline = time.monotonic() + patience_s
        _send(number, self.alive())
        while self.alive() and time.monotonic() < deadline and not out_of_patience():
            time.sleep(_POLL_S)  # most of them are no children of ours, which alone could be waited for

    def end(self) -> list[int]:
        """Kill all; the ids of those that not even that ended within 10 seconds."""
        deadline = time.monotonic() + _KILL_WAIT_S
        # More than once: a process may have forked between the look and the kill.
        while (rest := self.alive()) and time.monotonic() < deadline:
            _send(signal.SIGKILL, rest)
            time.sleep(_POLL_S)  # as above
        return [process.pid for process in rest]


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
