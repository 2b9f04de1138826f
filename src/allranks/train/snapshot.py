"""What the GPU's memory held when a rank first ran out of it, for https://pytorch.org/memory_viz and for the eye."""

from __future__ import annotations

from pathlib import Path

import torch

SNAPSHOT_DIR = "memory"


class FirstOom:
    """Writes ``memory/L0001-rank1.pickle`` and ``.txt`` below a run directory: once for each rank of a launch.

    The pickle is the allocator's snapshot: every segment and block, and, if asked for, the last allocations with their
    Python stacks. The text is ``torch.cuda.memory_summary``.
    """

    def __init__(self, device: torch.device, run_dir: Path, *, launch: int, rank: int, history: int) -> None:
        """Begin to record, if there is something to record.

        Args:
            device: of this rank; on a CPU nothing is ever written.
            run_dir: the run directory.
            launch: number of the launch.
            rank: this one.
            history: allocations to remember; 0: none, which costs nothing.
        """
        self._device = device
        self._stem = run_dir / SNAPSHOT_DIR / f"L{launch:04d}-rank{rank}"
        if device.type == "cuda" and history > 0:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=history)

    def write(self) -> Path | None:
        """To be called while everything that did not fit is still held.

        Returns:
            The snapshot; None on a CPU, and from the second time on.

        Raises:
            OSError: it could not be written.
        """
        snapshot, summary = self._stem.with_suffix(".pickle"), self._stem.with_suffix(".txt")
        if self._device.type != "cuda" or snapshot.exists():
            return None
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text(torch.cuda.memory_summary(self._device), encoding="utf-8")
        torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        return snapshot
