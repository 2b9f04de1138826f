"""The coordinator for a training loop of one's own: a global batch goes in, a committed optimizer step comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allranks.caps import Caps
from allranks.errors import UserError
from allranks.library.accounts import Place
from allranks.library.replica import Replica
from allranks.library.samples import MicroBatch, cut, length_of, row_count
from allranks.library.together import Reduced, Together

_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""

Forward = Callable[[Any], tuple[torch.Tensor, Any]]
"""A micro-batch in; the loss summed over its targets (a scalar) and the number of its targets out."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One committed step, the same on all ranks.

    Attributes:
        loss: mean over the targets of the global batch.
        grad_norm: of that loss's gradient, before clipping.
        samples: samples of the global batch.
        targets: targets of the global batch.
        skipped: the fp16 gradients overflowed, so the update was left out; the samples count all the same.
        retries: times the global batch was taken again.
        max_samples: most samples in a micro-batch from now on.
        max_tokens: most tokens in one, padding included; None: no limit.
    """

    loss: float
    grad_norm: float
    samples: int
    targets: int
    skipped: bool
    retries: int
    max_samples: int
    max_tokens: int | None


class Coordinator:
    """Makes all ranks of an accelerate loop (DDP or one process) act together when one of them fails.

    A step works through this rank's samples in micro-batches, without any collective. Then all ranks vote. If one
    ran out of memory, all halve their micro-batches and take the same global batch again. If all are done, the
    gradients are summed over the ranks once, in fp32, divided by the number of targets of the global batch, and
    applied after a second vote.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: what `accelerator.prepare` returned for it.
        optimizer: what `accelerator.prepare` returned for it.
        max_samples: most samples in a micro-batch at first.
        max_tokens: most tokens in one, padding included; None: no limit.
        max_grad_norm: gradients are clipped to this norm; None: they are not.
        length: tokens of one sample; by default the elements of its largest tensor, list or text.
        max_retries: times that one global batch is taken again before all ranks stop.
        record_dir: folder for one file per failure, in `failures/`; None: none are written.

    Raises:
        UserError: the model, the accelerator or a value can't be used; the message has the fix.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        max_samples: int,
        max_tokens: int | None = None,
        max_grad_norm: float | None = None,
        length: Callable[[Any], int] = length_of,
        max_retries: int = 16,
        record_dir: str | Path | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UserError(f"max_grad_norm={max_grad_norm}: must be above 0\n    fix: None clips nothing")
        caps = Caps(max_samples=max_samples, max_tokens=max_tokens)
        replica = Replica(accelerator, model)
        replica.require_parameters_of(optimizer)
        if accelerator.scaler is not None and not hasattr(optimizer, "step_was_skipped"):
            raise UserError(
                f"the optimizer is a {type(optimizer).__name__}, which knows nothing of the fp16 loss scale\n"
                "    fix: give the optimizer that accelerator.prepare returned"
            )
        self._together = Together(accelerator, replica, caps=caps, max_retries=max_retries, record_dir=record_dir)
        self._replica = replica
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._length = length

    @property
    def caps(self) -> Caps:
        """What a micro-batch may hold; the same on all ranks."""
        return self._together.policy.train.caps

    def step(self, samples: Any, forward: Forward) -> Step:
        """One optimizer step on the global batch of which `samples` are this rank's part.

        All ranks call it, with as many samples as they have, which may be none. The gradient that is applied is that
        of sum(losses) / sum(targets) over all samples of all ranks, however they are cut into micro-batches.

        Args:
            samples: a list of samples, or a dictionary of tensors (and lists) with the samples in the first dimension.
            forward: takes some of them, in the same form, and returns the loss summed over their targets, not the
                mean, and the number of those targets. It does not call backward. It is called again on a retry.

        Raises:
            StopTraining: the same on all ranks, which agreed to stop; ``exit_code`` and ``reason`` say why.
            ControlPlaneLost: a rank is gone.
        """
        reduced = self._together.reduced(
            _count(samples), lambda caps: cut(samples, caps, self._length), partial(self._work, forward)
        )
        self._together.updated(partial(self._update, reduced))
        caps = self.caps
        return Step(
            loss=reduced.loss,
            grad_norm=reduced.grad_norm,
            samples=reduced.samples,
            targets=reduced.targets,
            skipped=reduced.overflowed,
            retries=reduced.retries,
            max_samples=caps.max_samples,
            max_tokens=caps.max_tokens,
        )

    def close(self) -> None:
        """Give thread and process group back, on all ranks; only needed before another Coordinator is made."""
        self._together.close()

    def _work(self, forward: Forward, micro_batch: MicroBatch, place: Place) -> tuple[torch.Tensor, int]:
        loss, targets = _checked(forward(micro_batch.data))
        place.phase = "backward"
        self._accelerator.backward(loss.float())
        return loss.detach(), targets

    def _update(self, reduced: Reduced) -> None:
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.unscale_(self._optimizer.optimizer)
        if self._max_grad_norm is not None and not reduced.overflowed:
            self._replica.scale(min(1.0, self._max_grad_norm / (reduced.grad_norm + _CLIP_EPSILON)))
        self._optimizer.step()
        self._replica.clear()


def _count(samples: Any) -> int:
    """Samples of this rank, before any is touched; what is no batch at all is refused in the attempt, on all ranks."""
    if isinstance(samples, Mapping):
        return row_count(samples) or 0
    return len(samples) if hasattr(samples, "__len__") else 0


def _checked(returned: Any) -> tuple[torch.Tensor, int]:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(
            f"forward returned a {type(returned).__name__}\n    fix: return (loss, targets): the loss summed over the "
            "targets of the micro-batch and their number; a mean times its number of targets is a sum"
        )
    loss, targets = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UserError(
            f"the loss that forward returned is {what}, or has no gradient\n    fix: return a scalar that was computed "
            "from the model's output with gradients on"
        )
    count = float(targets)
    if count < 0 or count != int(count):
        raise UserError(f"the number of targets that forward returned is {count}\n    fix: return a whole number")
    return loss.reshape(()), int(count)
