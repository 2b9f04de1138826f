"""How long the device takes for each micro-batch, without waiting for it."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class Stopwatch:
    """Marks points of the device's work and says later, when it has got past them, what lay between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def begin(self) -> None:
        """The first lap begins; earlier ones are forgotten."""
        self._times.clear()
        self._used = 0
        self.lap()

    def lap(self) -> None:
        """One lap ends and the next begins."""
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._used].record(torch.cuda.current_stream(self._device))
        self._used += 1

    def laps(self) -> list[float]:
        """Seconds of each lap; on a GPU, call it once the last one is known to be past."""
        if self._device.type != "cuda":
            return [after - before for before, after in pairwise(self._times)]
        marks = self._events[: self._used]
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
