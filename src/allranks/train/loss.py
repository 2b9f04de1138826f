"""The loss of contract B6: a sum over target tokens, weighted so that all micro-batches of all ranks add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over the micro-batch of each sample's summed cross-entropy times the sample's weight.

    With weight 1 ÷ (target tokens of the global batch) for every sample, the sum over all micro-batches of all
    ranks is the mean token loss of the global batch, however it was split.

    Args:
        logits: [batch, tokens, vocabulary] of a language model, or [batch, classes] of a classifier.
        labels: [batch, tokens], `IGNORED` where there is no target and on padding; or [batch] classes.
        weights: [samples], fp32.
        starts: [samples + 1] where each sample of a flat sequence begins, and the end; None: a sample is a row.

    Returns:
        A scalar in fp32; 0, with a gradient of zeros, where no sample has a target.
    """
    if logits.dim() == 2:
        targets = labels.reshape(-1)
        losses = F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
        return (losses * weights).sum()
    # Token t predicts token t + 1. Only the positions that have a target are upcast to fp32.
    targets = labels[:, 1:]
    rows, columns = torch.nonzero(targets != IGNORED, as_tuple=True)
    losses = F.cross_entropy(logits[rows, columns].float(), targets[rows, columns], reduction="none")
    if rows.numel() == 0:
        return logits.float().sum() * 0.0
    samples = rows if starts is None else torch.bucketize(columns + 1, starts[1:], right=True)
    return (losses * weights[samples]).sum()
