"""Micro-batches as tensors: padded rows, or one flat sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from allranks.data.tokens import IGNORED_LABEL, TokenArrays, Tokens

ModelInputs = dict[str, torch.Tensor | int]
"""Keyword arguments of a model, ``labels`` among them."""


@dataclass(frozen=True, kw_only=True)
class Collate:
    """Makes the micro-batches of one run.

    Attributes:
        pad_token_id: written where there is no token.
        flat: one sequence without padding, for kernels that keep samples apart by their starts.
    """

    pad_token_id: int
    flat: bool

    def __call__(self, samples: Sequence[Tokens | TokenArrays]) -> ModelInputs:
        """As `flat_batch` or `pad_batch` makes it."""
        return flat_batch(samples, self.pad_token_id) if self.flat else {**pad_batch(samples, self.pad_token_id)}

    def tokens(self, lengths: Sequence[int]) -> int:
        """What a micro-batch of samples of these lengths holds, padding included."""
        return sum(lengths) if self.flat else len(lengths) * max(lengths, default=0)


def on_device(batch: Mapping[str, torch.Tensor | int], device: torch.device) -> ModelInputs:
    """`batch` with its tensors on `device`."""
    return {name: moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. A GPU is not waited for: a copy from pageable memory would stand behind all the
    work that it still has.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def flat_batch(samples: Sequence[Tokens | TokenArrays], pad_token_id: int) -> ModelInputs:
    """All `samples` end to end.

    Args:
        samples: of one micro-batch; none gives a filler, as `pad_batch` does.
        pad_token_id: the token of the filler.

    Returns:
        int64 tensors ``input_ids``, ``position_ids`` (from 0 in each sample) and ``labels``, each [1, tokens], the
        first label of each sample being -100, for no token of its own sample comes before it; int32 tensors
        ``cu_seq_lens_q`` and ``cu_seq_lens_k``, [samples + 1], where each sample begins, and the end; and the ints
        ``max_length_q`` and ``max_length_k``. For sequence-classification ``labels`` is [samples].
    """
    if not samples:
        samples = [Tokens(input_ids=[pad_token_id], labels=[IGNORED_LABEL])]
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    labels = torch.from_numpy(np.concatenate([np.asarray(sample.labels, dtype=np.int64) for sample in samples]))
    if len(labels) == int(starts[-1]):
        labels[starts[:-1]] = IGNORED_LABEL
        labels = labels[None]
    places = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)
    boundaries = starts.to(torch.int32)
    longest = int(lengths.max())
    return {
        "input_ids": torch.from_numpy(np.concatenate([np.asarray(s.input_ids, dtype=np.int64) for s in samples]))[None],
        "position_ids": places[None],
        "labels": labels,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def pad_batch(
    samples: Sequence[Tokens | TokenArrays], pad_token_id: int, padding_side: Literal["right", "left"] = "right"
) -> dict[str, torch.Tensor]:
    """Pad `samples` to the longest of them.

    Padding is known by its position, not by its token: an EOS that doubles as the pad token stays a target.

    Args:
        samples: of one micro-batch; none gives a filler, one token without a target, so that a rank without
            samples runs the same collectives as the others.
        pad_token_id: written where there is no token.
        padding_side: where the padding goes.

    Returns:
        int64 tensors: ``input_ids``, ``attention_mask`` (1 on tokens), ``labels`` (-100 on padding) and
        ``position_ids``, each [samples, tokens]. For sequence-classification ``labels`` is [samples], and
        there are no ``position_ids`` with padding on the right: encoders count positions in ways of their own.
    """
    if not samples:
        samples = [Tokens(input_ids=[pad_token_id], labels=[IGNORED_LABEL])]
    width = max(len(sample.input_ids) for sample in samples)
    classes = any(len(sample.labels) != len(sample.input_ids) for sample in samples)
    shape = (len(samples), width)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    for row, sample in enumerate(samples):
        count = len(sample.input_ids)
        here = slice(0, count) if padding_side == "right" else slice(width - count, width)
        input_ids[row, here] = torch.from_numpy(np.asarray(sample.input_ids, dtype=np.int64))
        attention_mask[row, here] = 1
        if not classes:
            labels[row, here] = torch.from_numpy(np.asarray(sample.labels, dtype=np.int64))
    if classes:
        labels = torch.tensor([sample.labels[0] for sample in samples], dtype=torch.int64)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if padding_side == "left":
        batch["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    elif not classes:
        batch["position_ids"] = torch.arange(width).expand(shape).contiguous()
    return batch
