"""A save is an attempt: all ranks gather, rank 0 writes a fresh folder, all agree, the pointer moves."""

from __future__ import annotations

import time

from allranks.checkpoints.store import CheckpointRef, TrainState
from allranks.strategies.base import NamedTensors, OptimizerState
from allranks.train.context import Context
from allranks.train.job import Job
from allranks.train.together import Attempt, together
from allranks.train.versions import versions


def save(ctx: Context, job: Job) -> None:
    """Write a checkpoint of the committed step and make it the latest.

    Raises:
        StopTraining: it could not be written; the earlier checkpoint stays usable.
    """
    step = job.position.step
    began = time.monotonic()

    def gather(at: Attempt) -> tuple[NamedTensors, OptimizerState]:
        ctx.injector.at("save", at.key.step)
        return job.strategy.trainable(), job.strategy.optimizer_state()

    def write(at: Attempt) -> CheckpointRef | None:
        at.enter("write")
        if not ctx.is_main:
            return None
        return job.store.write(train_state(ctx, job), adapter, optimizer, job.peft_config, tied=job.tied)

    def publish(at: Attempt) -> None:
        at.enter("publish")
        if written is not None:
            job.store.publish(written)

    collective = ctx.world_size > 1 and job.strategy.gathers
    (adapter, optimizer), _ = together(ctx, "save", step, gather, collective=collective)
    written, _ = together(ctx, "save", step, write)
    together(ctx, "save", step, publish)
    ctx.policy = ctx.policy.finished("save")
    if written is None:
        return
    for word in job.store.prune():
        ctx.note(word)
    seconds = time.monotonic() - began
    path = job.store.path(written)
    ctx.events.write("save", step=step, path=path.name, seconds=seconds, bytes=written.bytes)
    ctx.console.say(f"saved checkpoint of step {step}: {path.name}")


def train_state(ctx: Context, job: Job) -> TrainState:
    """All that a resumed run needs besides its tensors."""
    return TrainState(
        step=job.position.step,
        epoch=job.position.epoch,
        consumed=job.position.consumed,
        global_batch_size=job.order.global_batch_size,
        fingerprint=job.order.fingerprint,
        seed=job.order.seed,
        window=job.order.window,
        caps=ctx.policy.train.caps,
        eval_caps=ctx.policy.evaluation.caps,
        cost=(job.cost.a, job.cost.b),
        scaler=job.scale.state(),
        optimizer=ctx.plan.config.training.optim,
        world_size=ctx.world_size,
        profile_kind=ctx.rank.profile,
        versions=versions(),
        wall_s=job.earlier_s + time.monotonic() - ctx.started,
        approximate=job.approximate,
    )
