"""What a rank says. Rank 0 reports progress; every rank may say that something went wrong."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from allranks import environment
from allranks.units import human_seconds


class Console:
    """Lines of one rank on its standard output, which the launcher prefixes and shows.

    Args:
        main: this is rank 0.
    """

    def __init__(self, *, main: bool) -> None:
        self._main = main
        self._live = environment.get(environment.LIVE_LINE_FLAG) == "1"

    def say(self, message: str) -> None:
        """Print a line."""
        # A log on a full disk must not end the run: the next save will say that the disk is full.
        with suppress(OSError):
            print(message, flush=True)

    def progress(self, message: str) -> None:
        """Replace the live line, on rank 0 under a launcher with a terminal; else nothing."""
        if self._main and self._live:
            with suppress(OSError):
                sys.stdout.write(f"{message}\r")
                sys.stdout.flush()


class Pace:
    """Estimates the time left from the steps done in this launch.

    Args:
        done: steps done before this launch.
        total: steps of the run.
    """

    def __init__(self, *, done: int, total: int) -> None:
        self._first = done
        self._total = total
        self._since = time.monotonic()

    def left(self, done: int) -> str:
        """Time left, e.g. ``3 min 07 s``; ``?`` before the first step is done."""
        if done <= self._first:
            return "?"
        per_step = (time.monotonic() - self._since) / (done - self._first)
        return human_seconds(per_step * (self._total - done))
