"""The coordinator inside `transformers.Trainer`: an accumulated batch is one attempt of all ranks.

The Trainer asks for one training step per batch and expects the gradients after the last batch before an optimizer
step. So the batches are only kept until that last one, and then worked through together, cut smaller if need be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from allranks.caps import Caps
from allranks.errors import UserError
from allranks.library.replica import Replica
from allranks.library.samples import MicroBatch, cut_rows, row_count
from allranks.library.together import Together

_IGNORED = -100
_PROBE_TOLERANCE = 1e-4
"""Relative; half of a number is exact in every dtype, but two forwards on a GPU may differ in their last digits."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One batch of the Trainer's, with what the Trainer would divide its loss by.

    Attributes:
        inputs: of the model, with labels.
        num_items: targets of the accumulated batch, where the loss is divided by them; else None.
        steps: batches of the accumulated batch, by whose number the Trainer divides other losses.
    """

    inputs: Any
    num_items: Any
    steps: float


class CoordinatorMixin:
    """Put before a `transformers.Trainer` class, it makes all ranks act together (DDP or one process).

    When a rank runs out of memory in a training step, all ranks take the same accumulated batch again in smaller
    micro-batches. Nothing else of the Trainer changes: batches, their order, loss, clipping, optimizer step, callbacks.

    Attributes:
        max_retries: times that one accumulated batch is taken again before all ranks stop.
        record_dir: folder for one file per failure, in `failures/`; None: none are written.
    """

    max_retries: int = 16
    record_dir: str | Path | None = None

    accelerator: Any
    args: Any
    current_gradient_accumulation_steps: float
    loss_is_scaled_for_ga: bool | None
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    compute_loss: Any
    compute_loss_context_manager: Any
    _prepare_inputs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._together: Together | None = None
        self._together_model: torch.nn.Module | None = None
        self._collected: list[_Batch] = []
        self._additive: bool | None = None
        _check_arguments(self.args)

    @property
    def caps(self) -> Caps | None:
        """What a micro-batch may hold, the same on all ranks; None before the first training step."""
        return None if self._together is None else self._together.policy.train.caps

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Keep the batch, or, if it is the last one before an optimizer step, work through all that were kept.

        Raises:
            UserError: the model can't be used; the message has the fix.
            StopTraining: the same on all ranks, which agreed to stop.
            ControlPlaneLost: a rank is gone.
        """
        together = self._joined(model)
        self._collected.append(
            _Batch(inputs=inputs, num_items=num_items_in_batch, steps=self.current_gradient_accumulation_steps)
        )
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        reduced = together.reduced(
            sum(_rows(batch) or 1 for batch in batches),
            lambda caps: _cut(batches, caps),
            lambda micro_batch, _place: self._micro_step(model, micro_batch),
            divisor=float(self.accelerator.num_processes),
        )
        together.committed()
        return torch.tensor(reduced.share, device=self.args.device)

    def _joined(self, model: torch.nn.Module) -> Together:
        if self._together is None or self._together_model is not model:
            if self._together is not None:
                self._together.close()
            self._together = Together(
                self.accelerator,
                Replica(self.accelerator, model),
                caps=Caps(max_samples=self.args.train_batch_size, max_tokens=None),
                max_retries=self.max_retries,
                record_dir=self.record_dir,
            )
            self._together_model = model
        return self._together

    def _micro_step(self, model: torch.nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, int]:
        """Forward and backward by the Trainer's own training step."""
        piece, whole = micro_batch.data
        samples = len(micro_batch.positions)
        share = 1.0 if piece is whole.inputs else self._share(piece, whole.inputs)
        if share == 0.0:
            return torch.zeros((), device=self.args.device), samples
        steps, scaled = self.current_gradient_accumulation_steps, self.loss_is_scaled_for_ga
        counts_as_scaled = self._counts_as_scaled(whole.num_items)
        try:
            self.current_gradient_accumulation_steps = whole.steps / share
            if share < 1.0 and counts_as_scaled and not self._adds_up(model, piece, whole.num_items):
                self.loss_is_scaled_for_ga = False  # so that it is divided, by the share alone
                self.current_gradient_accumulation_steps = 1.0 / share
            loss: torch.Tensor = super().training_step(model, piece, whole.num_items)  # type: ignore[misc]
        finally:
            self.current_gradient_accumulation_steps, self.loss_is_scaled_for_ga = steps, scaled
        return loss, samples

    def _counts_as_scaled(self, num_items: Any) -> bool:
        """Whether the Trainer leaves a loss alone; else it divides it by `current_gradient_accumulation_steps`."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None

    def _adds_up(self, model: torch.nn.Module, piece: Any, num_items: Any) -> bool:
        """Whether the losses of pieces add up, being sums divided by `num_items`; else they are means.

        Many a model takes `num_items_in_batch` and makes nothing of it, so it is tried: a sum halves when it is
        divided by twice the number, a mean stays.

        Raises:
            UserError: the loss does neither.
        """
        if num_items is None:
            return False
        if self._additive is None:
            once, twice = (self._loss_without_gradient(model, piece, num_items * times) for times in (1, 2))
            if once == 0.0 or not math.isfinite(once):
                return True  # nothing can be seen in this piece
            if not any(math.isclose(twice, once / by, rel_tol=_PROBE_TOLERANCE) for by in (1, 2)):
                raise UserError(
                    f"a loss of {once:.6g} became {twice:.6g} when num_items_in_batch was doubled: it is neither a sum "
                    "divided by that number nor a mean, so a batch can't be cut without changing it\n"
                    "    fix: lower per_device_train_batch_size, or leave extra terms out of the loss"
                )
            self._additive = math.isclose(twice, once / 2, rel_tol=_PROBE_TOLERANCE)
        return self._additive

    def _loss_without_gradient(self, model: torch.nn.Module, inputs: Any, num_items: Any) -> float:
        device = self.args.device
        on_cpu = device.type == "cpu"
        with torch.no_grad(), torch.random.fork_rng(devices=[] if on_cpu else [device]):
            torch.manual_seed(0)
            with self.compute_loss_context_manager():
                return float(self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items))

    def _share(self, piece: Any, whole: Any) -> float:
        """Share of a batch's targets, or of its samples where it has no labels, that a piece of it has."""
        counts = [self._items(part) for part in (piece, whole)]
        return counts[0] / max(1, counts[1])

    def _items(self, inputs: Any) -> int:
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor):
            return row_count(inputs) or 1
        if "shift_labels" not in inputs and getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return int(labels.ne(_IGNORED).sum())


class CoordinatedTrainer(CoordinatorMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with all ranks acting together; of a subclass: `class Mine(CoordinatorMixin, Sub)`."""


def _rows(batch: _Batch) -> int | None:
    """Samples of a batch that can be cut; None if it can't: its values have no common number of rows."""
    return row_count(batch.inputs) if isinstance(batch.inputs, Mapping) else None


def _cut(batches: list[_Batch], caps: Caps) -> list[MicroBatch]:
    """Micro-batches of one batch each: its inputs, or some rows of them, and the batch."""
    micro_batches: list[MicroBatch] = []
    first = 0
    for batch in batches:
        rows = _rows(batch)
        pieces = [] if rows is None else cut_rows(batch.inputs, caps, first=first)
        if len(pieces) < 2:
            tokens = sum(piece.tokens for piece in pieces) or 1
            positions = tuple(range(first, first + (rows or 1)))
            micro_batches.append(MicroBatch(positions=positions, tokens=tokens, data=(batch.inputs, batch)))
        else:
            micro_batches += [
                MicroBatch(positions=piece.positions, tokens=piece.tokens, data=(piece.data, batch)) for piece in pieces
            ]
        first += rows or 1
    return micro_batches


def _check_arguments(args: Any) -> None:
    if not hasattr(Trainer, "loss_is_scaled_for_ga"):
        raise UserError(
            "this transformers' Trainer can't be told how its loss is scaled\n    fix: use transformers 5.24"
        )
    if args.auto_find_batch_size:
        raise UserError(
            "auto_find_batch_size=True starts the training again on one rank's own decision\n"
            "    fix: leave it out; micro-batches shrink on all ranks without it"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise UserError(
            f"optim={optim} updates the weights inside backward, which can't be taken again\n"
            "    fix: use an optimizer that updates them afterwards, adamw_torch_fused for one"
        )
