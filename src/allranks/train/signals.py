"""What the stop signals mean to a rank. Decided in a thread: the main thread may sit in a collective for good.

Python's own signal handlers run in the main thread, between two of its bytecodes. What runs at once, wherever the
main thread is, is the byte that the interpreter's C handler writes to `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from allranks.rundir import launcher_lives, stop_requested

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REQUEST_WAIT_S = 1.5
_POLL_S = 0.1


def listen(
    run_dir: Path,
    *,
    restarted_by_agent: bool,
    stop: Callable[[str], None],
    leaves: Callable[[], bool],
    leave: Callable[[], None],
) -> None:
    """Take SIGTERM and SIGINT from now on; for the main thread, once.

    Where torchelastic restarts the ranks it sends SIGTERM to those that live when one has died: then there is nothing
    to save and nobody to vote with. A SIGTERM that is meant to stop the run comes with a stop request in the run
    directory, or when the launcher is gone.

    Args:
        run_dir: the run directory.
        restarted_by_agent: torchelastic starts the ranks again when one dies.
        stop: called with the name of a signal that asks to save and leave.
        leaves: whether this rank is on its way out, because it has lost its peers.
        leave: called when the other ranks are being ended; must end the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def serve() -> None:
        while True:
            for number in os.read(reader, 64):
                if number not in _STOP_SIGNALS:
                    continue
                if number == signal.SIGTERM and restarted_by_agent and (leaves() or not _meant_to_stop(run_dir)):
                    leave()
                stop(signal.Signals(number).name)

    threading.Thread(target=serve, daemon=True, name="signals").start()


def _meant_to_stop(run_dir: Path) -> bool:
    # Slurm signals ranks and launcher in the same instant, and the launcher's request follows.
    until = time.monotonic() + _REQUEST_WAIT_S
    while time.monotonic() < until:
        if stop_requested(run_dir) is not None or not launcher_lives(run_dir):
            return True
        time.sleep(_POLL_S)
    return False
