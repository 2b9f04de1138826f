"""What a failed rank says about it: to its peers through the store, and to people in a file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.coordinator.attempt import AttemptKey, Failed
from allranks.coordinator.failure import FailureRecord
from allranks.library.samples import MicroBatch

LOG = logging.getLogger("allranks")


@dataclass
class Place:
    """How far a rank is in its part of an attempt.

    Attributes:
        key: the attempt, the same on all ranks.
        phase: what it is doing, e.g. ``backward``.
        micro_step: index of the micro-batch.
        micro_batch: the micro-batch it is at.
    """

    key: AttemptKey
    phase: str = "forward"
    micro_step: int | None = None
    micro_batch: MicroBatch | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """Samples of the micro-batch under way."""
        return self.micro_batch.positions if self.micro_batch else ()

    @property
    def tokens(self) -> int:
        """Its size, padding included."""
        return self.micro_batch.tokens if self.micro_batch else 0


class Accounts:
    """Of the failures of one rank and of its peers.

    Args:
        rank: this rank.
        world_size: ranks.
        folder: where files go, in `failures/`; None: none are written.
    """

    def __init__(self, *, rank: int, world_size: int, folder: Path | None) -> None:
        self._rank = rank
        self._folder = folder
        self._own: dict[str, str] = {}
        self._store: Any = None
        if world_size > 1:
            self._store = dist.distributed_c10d._get_default_store()

    def leave(self, failed: Failed, place: Place) -> None:
        """Say what happened; before the vote, so that who has voted can be asked."""
        name = _name(place.key, self._rank)
        self._own = {name: failed.message}
        if self._store is not None:
            self._store.set(name, failed.message)
        if self._folder is not None and self._record(failed, place).write(self._folder) is None:
            LOG.warning("the failure record of step %d could not be written to %s", place.key.step, self._folder)

    def of(self, rank: int, key: AttemptKey) -> str:
        """What a rank has said of its failure in an attempt."""
        name = _name(key, rank)
        if self._store is None or name in self._own:
            return self._own.get(name, "")
        return bytes(self._store.get(name)).decode()

    def _record(self, failed: Failed, place: Place) -> FailureRecord:
        key, what = place.key, failed.classification
        return FailureRecord(
            launch=key.launch,
            generation=key.generation,
            step=key.step,
            phase=place.phase,
            attempt=key.attempt,
            rank=self._rank,
            kind=what.kind,
            message=failed.message,
            sticky=what.sticky,
            bytes_asked=what.bytes_asked,
            bytes_free=what.bytes_free,
            micro_step=place.micro_step,
            samples=len(place.positions),
            tokens=place.tokens,
            sample_ids=place.positions,
        )


def _name(key: AttemptKey, rank: int) -> str:
    return f"{key}/account/{rank}"
