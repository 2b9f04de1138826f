"""Saving: all ranks gather and agree, then rank 0 writes and publishes in the background while training goes on.

The pointer may move without a further vote: the write begins only after all ranks have agreed that the step is
committed and gathered, and nothing in it concerns another rank. A write that fails asks for a stop, which travels with
the next step's vote; at the end of that step all ranks come here and hear why.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from allranks.checkpoints.background import Snapshot
from allranks.checkpoints.store import TrainState
from allranks.errors import StopTraining
from allranks.train.context import Context
from allranks.train.job import Job, SaveUnderWay
from allranks.train.together import Attempt, RespawnNow, together
from allranks.train.versions import versions
from allranks.units import human_seconds

_WORTH_SAYING_S = 0.1
_SAVE_FAILED = "a save that failed"


def save(ctx: Context, job: Job, *, wait: bool) -> None:
    """Gather the committed step and hand it to the writer; the save before has ended first.

    Args:
        wait: stay until the checkpoint is the one that a resume takes.

    Raises:
        StopTraining: this one or the one before could not be written; the earlier checkpoint stays usable.
    """
    step = job.position.step
    due = time.monotonic()
    _end_the_one_before(ctx, job)
    began = time.monotonic()

    def gather(at: Attempt) -> Snapshot | None:
        ctx.injector.at("save", at.key.step)
        if not (ctx.is_main or job.strategy.gathers):
            return None
        job.copies.begin()
        keep = job.copies.copy if ctx.is_main else _drop
        adapter, optimizer = job.strategy.trainable(keep), job.strategy.optimizer_state(keep)
        if not ctx.is_main:
            return None
        return Snapshot(
            state=train_state(ctx, job),
            adapter=adapter,
            optimizer=optimizer,
            peft_config=job.peft_config,
            tied=job.tied,
        )

    snapshot, _ = together(ctx, "save", step, gather, collective=ctx.world_size > 1 and job.strategy.gathers)
    if snapshot is not None:
        ctx.writer.begin(job.store, snapshot, on_failure=lambda: ctx.signalled.append(_SAVE_FAILED))
        del snapshot
    job.saving = SaveUnderWay(step=step, due=due, began=began)
    if wait:
        _end(ctx, job)
    else:
        job.saving = replace(job.saving, released=time.monotonic())
    ctx.policy = ctx.policy.finished("save")


def tell_saved(ctx: Context, job: Job) -> None:
    """Say that the save under way has been published, once; on rank 0, and no matter for the others."""
    saved = ctx.writer.take()
    if saved is None:
        return
    assert job.saving is not None
    for word in saved.words:
        ctx.note(word)
    until = time.monotonic() if job.saving.released is None else job.saving.released
    ctx.events.write(
        "save",
        step=saved.step,
        path=saved.path.name,
        seconds=saved.published - job.saving.began,
        blocked_s=until - job.saving.due,
        bytes=saved.bytes,
    )
    ctx.console.say(f"saved checkpoint of step {saved.step}: {saved.path.name}")


def leave_nothing_unwritten(ctx: Context, job: Job, leaving: StopTraining | RespawnNow) -> None:
    """Before all ranks leave as agreed: let the save under way end, so that it counts."""
    if job.saving is None:
        return
    if ctx.is_main:
        _wait(ctx, job)
        tell_saved(ctx, job)
        if ctx.writer.failure is not None:
            ctx.note(str(ctx.writer.failure))
    if isinstance(leaving, RespawnNow):
        ctx.control.exchange([])  # the first one to leave takes the others along


def _end_the_one_before(ctx: Context, job: Job) -> None:
    before, at_work, began = job.saving, ctx.writer.busy, time.monotonic()
    if before is None:
        return
    _end(ctx, job)
    waited_s = time.monotonic() - began
    if at_work and waited_s >= _WORTH_SAYING_S:
        ctx.note(
            f"the save after step {job.position.step} waited {human_seconds(waited_s)} until that of step "
            f"{before.step} was written; a larger output.save_steps or a faster disk avoids it"
        )


def _end(ctx: Context, job: Job) -> None:
    """All ranks hear how the save under way ended.

    Raises:
        StopTraining: it could not be written.
    """

    def end(at: Attempt) -> None:
        at.enter("write")
        if ctx.is_main:
            _wait(ctx, job)
            if ctx.writer.failure is not None:
                raise ctx.writer.failure

    try:
        together(ctx, "save", job.position.step, end)
        tell_saved(ctx, job)
    finally:
        job.saving = None


def _drop(_tensor: torch.Tensor) -> torch.Tensor:
    """For a rank that only takes part in the gathering."""
    return torch.empty(0, device="cpu")


def _wait(ctx: Context, job: Job) -> None:
    ctx.writer.wait(lambda: ctx.entered("write", job.position.step, 0, 0))


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
        checkpointing=ctx.policy.checkpointing,
        skipped=ctx.policy.skipped,
        cost=(job.cost.a, job.cost.b, job.cost.c),
        scaler=job.scale.state(),
        optimizer=ctx.plan.config.training.optim,
        world_size=ctx.world_size,
        profile_kind=ctx.rank.profile,
        versions=versions(),
        wall_s=job.earlier_s + time.monotonic() - ctx.started,
        approximate=job.approximate,
    )
