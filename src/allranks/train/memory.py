"""How much memory this rank holds, needs and could still have, measured around each attempt."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One attempt of this rank.

    Attributes:
        held_bytes: allocated when it began (on a CPU, the resident set); None where the system does not say.
        peak_bytes: GPU memory allocated at most; None on a CPU.
        headroom_bytes: what the GPU could have given beyond that peak; None if it was not asked for, or on a CPU.
        allocator_retries: how often the GPU's allocator had to free its cache to go on.
    """

    held_bytes: int | None
    peak_bytes: int | None = None
    headroom_bytes: int | None = None
    allocator_retries: int = 0


class MemoryMeter:
    """Reads the allocator of this rank's device at the start and the end of each attempt."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: int | None = None
        self._retries = 0
        self._earlier_peak = 0

    def begin(self) -> None:
        """An attempt begins: its peak is measured anew."""
        if self._device.type != "cuda":
            self._held = _resident_bytes()
            return
        stats = torch.cuda.memory_stats(self._device)
        self._held = stats.get("allocated_bytes.all.current", 0)
        self._retries = stats.get("num_alloc_retries", 0)
        self._earlier_peak = max(self._earlier_peak, stats.get("allocated_bytes.all.peak", 0))
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, *, headroom: bool) -> Reading:
        """The attempt has ended.

        Args:
            headroom: ask the driver too, which costs a call into it.
        """
        if self._device.type != "cuda":
            return Reading(held_bytes=self._held)
        stats = torch.cuda.memory_stats(self._device)
        peak = stats.get("allocated_bytes.all.peak", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return Reading(
            held_bytes=self._held,
            peak_bytes=peak,
            headroom_bytes=self._limit_bytes(reserved) - peak if headroom else None,
            allocator_retries=stats.get("num_alloc_retries", 0) - self._retries,
        )

    @property
    def peak_bytes(self) -> int:
        """GPU memory that torch allocated at most so far; on a CPU, the process's largest resident set."""
        if self._device.type == "cuda":
            return max(self._earlier_peak, torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux gives KiB

    @property
    def reserved_bytes(self) -> int:
        """What this process has taken of its GPU for torch now; on a CPU, its resident set (0 if unknown)."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return _resident_bytes() or 0

    def _limit_bytes(self, reserved: int) -> int:
        """What this process could have of its GPU: what it has, and what is free, up to the fraction it may have."""
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        return min(free + reserved, allowed)


def _resident_bytes() -> int | None:
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
