"""What is trained, on what, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from allranks.batches.fit import CostFit
from allranks.batches.order import SampleOrder
from allranks.batches.split import Cost
from allranks.checkpoints.host_copies import HostCopies
from allranks.checkpoints.store import CheckpointStore
from allranks.data.collate import Collate
from allranks.data.prepare import PreparedData
from allranks.strategies.base import Strategy
from allranks.train.head import LossHead
from allranks.train.scaler import LossScale


@dataclass(frozen=True, kw_only=True)
class Position:
    """The data state of contract B2, at the last committed step.

    Attributes:
        step: committed optimizer steps.
        epoch: running epoch, from 0.
        consumed: samples of that epoch that the committed steps took.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0

    def after(self, samples: int, *, epoch_samples: int) -> Position:
        """The position one step of `samples` samples later; an epoch of `epoch_samples` that is used up ends."""
        step, consumed = self.step + 1, self.consumed + samples
        if consumed == epoch_samples:
            return Position(step=step, epoch=self.epoch + 1, consumed=0)
        return replace(self, step=step, consumed=consumed)


@dataclass(frozen=True, kw_only=True)
class SaveUnderWay:
    """A save whose tensors were gathered on all ranks. Times are those of `time.monotonic`.

    Attributes:
        step: committed step that is saved.
        due: when training stood still for it.
        began: when the gathering began.
        released: when training went on; None while it stands still.
    """

    step: int
    due: float
    began: float
    released: float | None = None


@dataclass(kw_only=True)
class Job:
    """The parts of a training run, the same on every rank but for the tensors.

    Attributes:
        model: the PEFT model itself, below whatever the strategy wrapped around it.
        strategy: the spread model with its optimizer.
        peft_config: PEFT's configuration of the adapter, as a dictionary.
        shapes: of the trained parameters, by name.
        tied: names under which a trained parameter is saved too, by the name it is trained under.
        tokenizer: of the run.
        data: the tokenised sets.
        order: which samples make up each global batch.
        cost: of a micro-batch, for the split.
        fit: what micro-batches say of the cost.
        head: from a micro-batch to its loss.
        collate: makes micro-batches into tensors: padded rows, or one flat sequence.
        total_steps: optimizer steps of the run.
        scale: loss scale (fp16).
        store: checkpoints; while the writer of the context is busy, its alone.
        copies: what a checkpoint is written from; while the writer is busy, its alone too.
        saving: the save on whose end the ranks have not agreed yet; the same on all of them but for its times.
        checkpointing: the model recomputes activations in backward.
        position: how far the run is.
        earlier_s: seconds of training in earlier launches.
        eval_loss_before: evaluation loss of the base model.
        last_loss: of the last committed step.
        last_eval_loss: of the last evaluation.
        approximate: optimizer state was requantised at a resume.
        steps_here: committed by this process.
    """

    model: Any
    strategy: Strategy
    peft_config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    tokenizer: Any
    data: PreparedData
    order: SampleOrder
    cost: Cost
    fit: CostFit
    head: LossHead
    collate: Collate
    total_steps: int
    scale: LossScale
    store: CheckpointStore
    checkpointing: bool
    position: Position
    copies: HostCopies = field(default_factory=HostCopies)
    saving: SaveUnderWay | None = None
    earlier_s: float = 0.0
    eval_loss_before: float | None = None
    last_loss: float = float("nan")
    last_eval_loss: float | None = None
    approximate: bool = False
    steps_here: int = 0
