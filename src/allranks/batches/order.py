"""The order in which samples are visited: contract B1, a pure function."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_ORDER_VERSION = 1
"""Part of every seed: a change of the algorithm below must not pass for the old order on resume."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleOrder:
    """Which samples make up each global batch.

    Depends on nothing but its arguments: the same on every rank, machine, profile and world size.

    Attributes:
        n_samples: samples in the set.
        lengths: tokens of each sample, shape [n_samples]; looked at only when `window` is above 1.
        seed: the run's seed.
        fingerprint: of the set's content.
        global_batch_size: samples of one step over all ranks.
        window: steps inside which samples are grouped by length; 1 leaves the shuffled order alone.
    """

    n_samples: int
    lengths: NDArray[np.integer]
    seed: int
    fingerprint: str
    global_batch_size: int
    window: int = 1
    _epochs: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("n_samples", "global_batch_size", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if len(self.lengths) != self.n_samples:
            raise ValueError(f"{len(self.lengths)} lengths for {self.n_samples} samples")
        if not self.fingerprint:
            raise ValueError("a set without a fingerprint has no reproducible order")

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of one epoch, the last of which may be smaller."""
        return -(-self.n_samples // self.global_batch_size)

    def batch(self, epoch: int, consumed: int) -> tuple[int, ...]:
        """Sample ids of the global batch that follows the first `consumed` samples of `epoch`.

        Args:
            epoch: from 0.
            consumed: samples of this epoch that committed steps have taken.

        Raises:
            ValueError: the epoch has no sample left.
        """
        if not 0 <= consumed < self.n_samples:
            raise ValueError(f"{consumed} samples consumed of an epoch of {self.n_samples}: no batch follows")
        ids = self.epoch_order(epoch)[consumed : consumed + self.global_batch_size]
        return tuple(ids.tolist())

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """All sample ids in the order of `epoch`, shape [n_samples]; the latest epoch asked for is kept."""
        if epoch not in self._epochs:
            order = self._shuffled(epoch)
            order.setflags(write=False)
            self._epochs.clear()
            self._epochs[epoch] = order
        return self._epochs[epoch]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        bits = np.random.PCG64(self._seed_of(epoch))
        order = _permutation(bits, self.n_samples)
        if self.window == 1:
            return order
        # The epoch's smaller last batch stays outside the windows: grouped, it would always hold the longest.
        grouped = self.n_samples - self.n_samples % self.global_batch_size
        for start in range(0, grouped, self.window * self.global_batch_size):
            block = order[start : min(start + self.window * self.global_batch_size, grouped)]
            by_length = block[np.argsort(self.lengths[block], kind="stable")]
            batches = by_length.reshape(-1, self.global_batch_size)
            block[:] = batches[_permutation(bits, len(batches))].reshape(-1)
        return order

    def _seed_of(self, epoch: int) -> int:
        parts = ("allranks order", _ORDER_VERSION, self.seed, epoch, self.fingerprint, self.window)
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest(), "big")


def _permutation(bits: np.random.PCG64, n: int) -> NDArray[np.int64]:
    """A permutation of ``range(n)`` from the raw stream of `bits`.

    NumPy's policy (NEP 19) fixes the raw stream of a bit generator, but not what ``Generator.permutation``
    makes of it: that one may change with a NumPy release, and a run resumed after it would meet another order.
    """
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.int64, copy=False)
