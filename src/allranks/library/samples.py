"""A rank's samples, as a list or as tensors with a batch dimension, cut into micro-batches under the caps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from allranks.batches.split import split
from allranks.caps import Caps
from allranks.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What goes through one forward and backward.

    Attributes:
        positions: places of its samples among this rank's samples of the global batch.
        tokens: its size, padding included.
        data: a list of samples, or a dictionary of tensors.
    """

    positions: tuple[int, ...]
    tokens: int
    data: Any

    @property
    def longest(self) -> int:
        """Tokens of its longest sample."""
        return -(-self.tokens // len(self.positions))


def cut(samples: Any, caps: Caps, length: Callable[[Any], int]) -> list[MicroBatch]:
    """All samples of this rank, once each, in micro-batches that keep the caps.

    Args:
        samples: a sequence of samples, which may be empty, or a mapping of tensors and lists [samples, ...].
        caps: of one micro-batch; a sample above `max_tokens` travels alone.
        length: tokens of one sample of a sequence; not asked about a mapping.

    Raises:
        UserError: `samples` is something else.
    """
    if isinstance(samples, Mapping):
        return cut_rows(samples, caps)
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise UserError(
            f"the samples of a step are a {type(samples).__name__}\n"
            "    valid: a list of samples, a dictionary of tensors with the samples in their first dimension"
        )
    lengths = [max(1, length(sample)) for sample in samples]
    [mine] = split(lengths, world_size=1, caps=caps, lockstep=False)
    return [
        MicroBatch(
            positions=positions,
            tokens=len(positions) * max(lengths[i] for i in positions),
            data=[samples[i] for i in positions],
        )
        for positions in mine
    ]


def cut_rows(batch: Mapping[str, Any], caps: Caps, *, first: int = 0) -> list[MicroBatch]:
    """Micro-batches of neighbouring rows, as equal as can be.

    Args:
        batch: tensors and lists, all with as many rows.
        caps: of one micro-batch; one row above `max_tokens` travels alone.
        first: position of the first row.

    Raises:
        UserError: the values have different numbers of rows.
    """
    rows = row_count(batch)
    if rows is None:
        raise UserError(
            f"the values of a batch have no common number of rows: {_shapes(batch)}\n"
            "    fix: give tensors or lists with the samples in their first dimension, or a list of samples"
        )
    width = max(1, *(value.numel() // max(1, rows) for value in batch.values() if isinstance(value, torch.Tensor)), 0)
    room = caps.max_samples if caps.max_tokens is None else max(1, min(caps.max_samples, caps.max_tokens // width))
    pieces = -(-rows // room)
    edges = [rows * piece // pieces for piece in range(pieces + 1)] if rows else [0]
    return [
        MicroBatch(
            positions=tuple(range(first + start, first + stop)),
            tokens=(stop - start) * width,
            data={name: value[start:stop] for name, value in batch.items()},
        )
        for start, stop in pairwise(edges)
    ]


def row_count(batch: Mapping[str, Any]) -> int | None:
    """Rows of all values of a batch; None if they differ or a value has none."""
    counts = {
        len(value) if not isinstance(value, torch.Tensor) else value.shape[0] if value.dim() else -1
        for value in batch.values()
        if isinstance(value, torch.Tensor | list | tuple)
    }
    if len(counts) != 1 or -1 in counts or not all(isinstance(v, torch.Tensor | list | tuple) for v in batch.values()):
        return None
    return counts.pop()


def length_of(sample: Any) -> int:
    """Size of a sample that says nothing about it: the elements of its largest tensor, list or text; else 1."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, Mapping):
        return max((length_of(value) for value in sample.values()), default=1)
    if isinstance(sample, tuple):
        return max(map(length_of, sample), default=1)
    return len(sample) if hasattr(sample, "__len__") else 1


def _shapes(batch: Mapping[str, Any]) -> str:
    def shape(value: Any) -> str:
        return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__

    return ", ".join(f"{name} {shape(value)}" for name, value in batch.items()) or "it is empty"
