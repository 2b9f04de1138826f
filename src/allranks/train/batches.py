"""Batches: the order of samples (B1) and the split of a global batch over ranks (B4), both pure."""

from __future__ import annotations

from allranks.train.order import SampleOrder
from allranks.train.split import Caps, Cost, MicroBatch, Split, split

__all__ = ["Caps", "Cost", "MicroBatch", "SampleOrder", "Split", "split"]
