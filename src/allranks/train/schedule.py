"""The learning rate and the number of steps: pure functions of the configuration."""

from __future__ import annotations

import math

from allranks.config.schema import TrainingConfig
from allranks.plan.planner import SMOKE_STEPS

WARMUP_RATIO = 0.03


def total_steps(config: TrainingConfig, steps_per_epoch: int, *, smoke: bool = False) -> int:
    """Optimizer steps of the run; `max_steps`, if given, wins over the epochs."""
    wanted = config.max_steps if config.max_steps is not None else config.num_train_epochs * steps_per_epoch
    return min(SMOKE_STEPS, wanted) if smoke else wanted


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """Learning rate of `step` (from 1) of `total`: linear warm-up, then the schedule, ending at 0.

    Cosine is the half period of transformers' `get_cosine_schedule_with_warmup`.
    """
    warmup = config.warmup_steps if config.warmup_steps is not None else math.ceil(WARMUP_RATIO * total)
    if step <= warmup:
        return config.learning_rate * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - 1 - warmup) / max(1, total - warmup)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
