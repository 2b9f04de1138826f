"""Micro-batches as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from allranks.data.tokens import IGNORED_LABEL, Tokens


def pad_batch(
    samples: Sequence[Tokens], pad_token_id: int, padding_side: Literal["right", "left"] = "right"
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
        input_ids[row, here] = torch.tensor(sample.input_ids)
        attention_mask[row, here] = 1
        if not classes:
            labels[row, here] = torch.tensor(sample.labels)
    if classes:
        labels = torch.tensor([sample.labels[0] for sample in samples], dtype=torch.int64)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if padding_side == "left":
        batch["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    elif not classes:
        batch["position_ids"] = torch.arange(width).expand(shape).contiguous()
    return batch
