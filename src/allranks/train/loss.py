"""The loss of contract B6: a sum over targets, weighted so that all micro-batches of all ranks add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from allranks.data.collate import ModelInputs, moved, on_device

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a micro-batch is to predict, and where.

    Attributes:
        positions: [targets] int64, rows of the logits, those of all samples laid end to end.
        labels: [targets] int64, the token or class that is right there.
        weights: [targets] fp32, of each in the loss.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device) -> Targets:
        """The same on `device`."""
        return Targets(
            positions=moved(self.positions, device),
            labels=moved(self.labels, device),
            weights=moved(self.weights, device),
        )


def targets_of(labels: torch.Tensor, weights: Sequence[float], starts: torch.Tensor | None = None) -> Targets:
    """The targets of a micro-batch. On the host: on a GPU it would have to wait for their number.

    Args:
        labels: [rows, tokens], `IGNORED` where there is no target and on padding; or [samples] classes.
        weights: of each sample. With 1 ÷ (targets of the global batch) for every sample, the sum over all micro-batches
            of all ranks is the mean loss of the global batch, however it was split.
        starts: [samples + 1] where each sample of a flat sequence begins, and the end; None: a sample is a row.
    """
    of_samples = torch.tensor(weights, dtype=torch.float32)
    if labels.dim() == 1:
        positions = torch.nonzero(labels != IGNORED)[:, 0]
        return Targets(positions=positions, labels=labels[positions], weights=of_samples[positions])
    # Token t predicts token t + 1.
    rows, columns = torch.nonzero(labels[:, 1:] != IGNORED, as_tuple=True)
    samples = rows if starts is None else torch.bucketize(columns + 1, starts[1:], right=True)
    return Targets(
        positions=rows * labels.shape[1] + columns, labels=labels[rows, columns + 1], weights=of_samples[samples]
    )


def split_off_targets(
    batch: Mapping[str, torch.Tensor | int], weights: Sequence[float], device: torch.device
) -> tuple[ModelInputs, Targets]:
    """The inputs and the targets of a micro-batch on `device`.

    Args:
        batch: as `Collate` makes it.
        weights: as of `targets_of`.
        device: where the model computes.
    """
    labels, starts = batch["labels"], batch.get("cu_seq_lens_q")
    assert isinstance(labels, torch.Tensor) and not isinstance(starts, int)
    inputs = on_device({name: value for name, value in batch.items() if name != "labels"}, device)
    return inputs, targets_of(labels, weights, starts).to(device)


def weighted_loss(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Sum over the targets of their cross-entropy times their weight.

    Args:
        logits: [rows, tokens, vocabulary] of a language model, or [samples, classes] of a classifier.
        targets: on the device of `logits`.

    Returns:
        A scalar in fp32; 0, with a gradient of zeros, where there is no target.
    """
    if not len(targets):
        return logits.float().sum() * 0.0
    # Only the positions that have a target are upcast.
    chosen = logits.flatten(0, -2).index_select(0, targets.positions).float()
    return (F.cross_entropy(chosen, targets.labels, reduction="none") * targets.weights).sum()
