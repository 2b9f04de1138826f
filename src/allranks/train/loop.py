"""The training loop. What happens to a run between its first and its last step, top to bottom."""

from __future__ import annotations

import time

from allranks.coordinator.adjustment import adjusted
from allranks.errors import ExitCode, StopTraining
from allranks.train.console import Pace
from allranks.train.context import Context
from allranks.train.costing import fit_cost
from allranks.train.evaluate import evaluate
from allranks.train.job import Job
from allranks.train.saving import leave_nothing_unwritten, save, tell_saved
from allranks.train.schedule import learning_rate
from allranks.train.step import Reduced, reduced_step
from allranks.train.together import RespawnNow, half_done, remember_caps
from allranks.units import human_bytes

_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def train(ctx: Context, job: Job) -> None:
    """Train from `job.position` to the last step.

    Raises:
        StopTraining: all ranks agreed to stop: out of memory at the floor, a loss that is not finite, a save that
            failed, or a request to stop (after saving).
        RespawnNow: all ranks leave, to be started again.
        ControlPlaneLost: a rank is gone.
    """
    try:
        _train(ctx, job)
    except (StopTraining, RespawnNow) as leaving:
        leave_nothing_unwritten(ctx, job, leaving)
        raise


def _train(ctx: Context, job: Job) -> None:
    config = ctx.plan.config
    pace = Pace(done=job.position.step, total=job.total_steps)
    if config.training.eval_on_start and job.data.eval is not None and job.position.step == 0:
        job.eval_loss_before = _evaluated(ctx, job)
    while job.position.step < job.total_steps:
        began = time.monotonic()
        ids = job.order.batch(job.position.epoch, job.position.consumed)
        reduced = reduced_step(ctx, job, ids)
        rate = learning_rate(config.training, job.position.step + 1, job.total_steps)
        _optimizer_step(ctx, job, reduced, rate)
        _commit(ctx, job, ids, reduced, seconds=time.monotonic() - began)
        _adjust_caps(ctx, job, reduced)
        fit_cost(ctx, job, reduced.part)
        step, last = job.position.step, job.position.step == job.total_steps
        if step % config.training.logging_steps == 0 or last:
            _log(ctx, job, ids, reduced, rate, seconds=time.monotonic() - began, left=pace.left(step))
        if job.data.eval is not None and _due(step, config.training.eval_steps, last):
            _evaluated(ctx, job)
        tell_saved(ctx, job)
        if _due(step, config.output.save_steps, last) or reduced.tally.stop_requested:
            save(ctx, job, wait=last or reduced.tally.stop_requested)
        if reduced.tally.stop_requested and not last:
            raise StopTraining(
                "interrupted",
                f"stopped on request after saving step {step} of {job.total_steps}; the same command resumes",
                ExitCode.INTERRUPTED,
            )


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


def _optimizer_step(ctx: Context, job: Job, reduced: Reduced, rate: float) -> None:
    """The update, after vote 2. A failure in it is never retried in place: some ranks may have made it."""
    step = job.position.step + 1
    if reduced.skipped:
        ctx.note(f"step {step}: the fp16 gradients overflowed; no update, loss scale is now {job.scale.value:g}")
        ctx.events.write("skipped_step", step=step, reason="fp16 overflow")
        return
    limit = ctx.plan.config.training.max_grad_norm
    clip = min(1.0, limit / (reduced.grad_norm + _CLIP_EPSILON)) if limit > 0 else 1.0

    def work() -> None:
        ctx.injector.at("step", step)
        job.strategy.step(rate, clip / job.scale.value)

    half_done(ctx, "step", step, work)


def _commit(ctx: Context, job: Job, ids: tuple[int, ...], reduced: Reduced, *, seconds: float) -> None:
    epoch = job.position.epoch
    job.position = job.position.after(len(ids), epoch_samples=job.order.n_samples)
    job.last_loss = reduced.loss
    ctx.committed_step = job.position.step
    caps = ctx.policy.train.caps
    ctx.events.write(
        "step",
        step=job.position.step,
        epoch=epoch,
        sample_ids=list(ids),
        skipped_samples=[i for i in ids if i in ctx.policy.skipped],
        micro_batches=[list(micro) for micro in reduced.part.mine],
        target_tokens=reduced.part.targets,
        loss=reduced.loss,
        grad_norm=reduced.grad_norm,
        seconds=seconds,
        caps=[caps.max_samples, caps.max_tokens],
    )


def _adjust_caps(ctx: Context, job: Job, reduced: Reduced) -> None:
    """Smaller micro-batches where the memory is so full that it slows the steps, larger ones where there is room."""
    decided = adjusted(
        ctx.policy,
        reduced.tally,
        largest_tokens=reduced.part.largest_tokens,
        in_place=not ctx.lockstep,
        grow_back=ctx.plan.config.oom.grow_back,
    )
    ctx.policy = decided.state
    if decided.reason is None:
        return
    remember_caps(ctx)
    caps = ctx.policy.train.caps
    ctx.events.write(
        "caps",
        step=job.position.step,
        reason=decided.reason,
        message=decided.message,
        caps=[caps.max_samples, caps.max_tokens],
    )
    if ctx.is_main:
        ctx.console.say(decided.message)


def _log(
    ctx: Context, job: Job, ids: tuple[int, ...], reduced: Reduced, rate: float, *, seconds: float, left: str
) -> None:
    rows = ctx.control.exchange([float(ctx.meter.peak_bytes), float(ctx.meter.reserved_bytes)])
    peaks = [int(row[0]) for row in rows]
    if not ctx.is_main:
        return
    tokens_per_s = float(job.data.train.lengths[list(ids)].sum()) / seconds
    ctx.events.write(
        "log",
        step=job.position.step,
        loss=reduced.loss,
        grad_norm=reduced.grad_norm,
        learning_rate=rate,
        tokens_per_s=tokens_per_s,
        peak_bytes=peaks,
        reserved_bytes=[int(row[1]) for row in rows],
    )
    spread = (
        human_bytes(max(peaks)) if min(peaks) == max(peaks) else f"{human_bytes(min(peaks))}–{human_bytes(max(peaks))}"
    )
    ctx.console.say(
        f"step {job.position.step}/{job.total_steps} · loss {reduced.loss:.4f} · grad norm {reduced.grad_norm:.3g} · "
        f"lr {rate:.2e} · {tokens_per_s:,.0f} tokens/s · peak {spread}"
    )
    ctx.console.progress(f"step {job.position.step}/{job.total_steps} · {left} left")


def _evaluated(ctx: Context, job: Job) -> float:
    step = job.position.step
    result = evaluate(ctx, job, step)
    job.last_eval_loss = result.loss
    if ctx.is_main:
        ctx.events.write(
            "eval",
            step=step,
            loss=result.loss,
            samples=result.samples,
            target_tokens=result.targets,
            seconds=result.seconds,
        )
        ctx.console.say(f"evaluation after step {step}: loss {result.loss:.4f} on {result.samples} samples")
    return result.loss
