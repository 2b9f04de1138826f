"""One optimizer step up to the reduced gradients: split, forward, backward, vote 1, reduction, vote 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from allranks.batches.fit import Work, work_of
from allranks.batches.split import split
from allranks.coordinator.agreement import ROW_WIDTH, vote_two
from allranks.coordinator.ballots import StepBallot, StepTally, StepVerdict, Tally, fingerprint
from allranks.coordinator.policy import Stop, decide_step
from allranks.data.collate import ModelInputs
from allranks.errors import StopTraining, UserError
from allranks.train.context import Context
from allranks.train.job import Job
from allranks.train.loss import split_off_targets
from allranks.train.model import checkpoint_activations
from allranks.train.together import Attempt, half_done, together

MicroBatches = tuple[tuple[int, ...], ...]
"""Sample ids of each micro-batch of one rank; an empty one is a filler that keeps the ranks in lockstep."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank did in an attempt; nothing of it is committed.

    Attributes:
        mine: this rank's micro-batches.
        works: for each, what sets its time: itself, or, in lockstep, the costliest of any rank in its place.
        largest_tokens: tokens, padding included, of the largest micro-batch of any rank.
        longest_tokens: tokens of the longest sample.
        losses: share of the global batch's loss per micro-batch, scalars on the device; not yet looked at.
        targets: target tokens.
    """

    mine: MicroBatches
    works: tuple[Work, ...]
    largest_tokens: int
    longest_tokens: int
    losses: list[torch.Tensor]
    targets: int


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A step on which all ranks agree: its gradients are summed, the optimizer may go.

    Attributes:
        part: what this rank did.
        tally: the vote that let it count.
        loss: of the global batch.
        grad_norm: of the global batch's gradient, before clipping.
        skipped: the fp16 gradients overflowed; the samples count, the optimizer does not go.
    """

    part: Part
    tally: Tally
    loss: float
    grad_norm: float
    skipped: bool


def reduced_step(ctx: Context, job: Job, ids: tuple[int, ...]) -> Reduced:
    """Forward, backward and reduction of the global batch `ids`, retried until all ranks have done it.

    Raises:
        StopTraining: the policy stops, or the loss is not finite.
        ControlPlaneLost: a rank is gone.
    """
    step = job.position.step + 1
    part, tally = together(
        ctx,
        "step",
        step,
        lambda at: _forward_backward(ctx, job, ids, at),
        collective=job.strategy.lockstep and ctx.world_size > 1,
    )
    norm = _reduce(ctx, job, step)
    # The one point of a step that waits for the GPU.
    losses: list[float] = torch.stack(part.losses).tolist() if part.losses else []
    vote = vote_two(
        ctx.control,
        StepBallot(
            committed_step=ctx.committed_step,
            caps_fingerprint=fingerprint(ctx.policy.footprint),
            reduced=True,
            loss_sum=math.fsum(losses),
            grad_norm=norm / job.scale.value,
            tokens=part.targets,
            expected_tokens=int(job.data.train.n_targets[list(_kept(ctx, ids))].sum()),
        ),
    )
    only_overflowed = job.scale.enabled and math.isfinite(vote.loss_sum)
    if vote.verdict is StepVerdict.NOT_FINITE and not only_overflowed:
        raise _not_finite(ctx, vote, part, ids, losses)
    ctx.policy = ctx.policy.finished("step", largest_tokens=part.largest_tokens, longest_tokens=part.longest_tokens)
    return Reduced(
        part=part,
        tally=tally,
        loss=vote.loss_sum,
        grad_norm=vote.ballots[0].grad_norm,
        skipped=job.scale.skips(norm),
    )


def _kept(ctx: Context, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Without the samples that all ranks leave out, for not even one of them alone fitted."""
    return tuple(i for i in ids if i not in ctx.policy.skipped)


def _split(ctx: Context, job: Job, ids: tuple[int, ...]) -> tuple[MicroBatches, ...]:
    """Per rank, its micro-batches under the caps in force, as sample ids; the same answer on all ranks."""
    parts = split(
        job.data.train.lengths[list(ids)].tolist(),
        world_size=ctx.world_size,
        caps=ctx.policy.train.caps,
        lockstep=job.strategy.lockstep,
        cost=job.cost,
        padded=not job.collate.flat,
    )
    return tuple(tuple(tuple(ids[i] for i in micro) for micro in part) for part in parts)


def _forward_backward(ctx: Context, job: Job, ids: tuple[int, ...], at: Attempt) -> Part:
    """This rank's micro-batches; their gradients add up in the strategy."""
    if ctx.policy.checkpointing and not job.checkpointing:
        checkpoint_activations(job.model)
        job.checkpointing = True
    ids = _kept(ctx, ids)
    if not ids:
        raise UserError(
            f"step {at.key.step}: every sample of the global batch is among those that do not fit, "
            f"{sorted(ctx.policy.skipped)}\n    fix: shorten data.max_length, or raise training.global_batch_size"
        )
    parts = _split(ctx, job, ids)
    mine = parts[ctx.rank.environment.rank]
    data = job.data.train
    weights = _weights(ctx, job, ids)
    losses: list[torch.Tensor] = []
    job.strategy.train_mode(True)
    job.strategy.begin_step()
    ctx.stopwatch.begin()
    for micro_step, sample_ids in enumerate(mine):
        if micro_step > 0 and not job.strategy.lockstep:
            ctx.flag.leave_if_raised(at.key)
        batch = job.collate([data.arrays(i) for i in sample_ids])
        tokens = job.collate.tokens(data.lengths[list(sample_ids)].tolist())
        at.enter("forward", micro_step=micro_step, sample_ids=sample_ids, tokens=tokens)
        torch.manual_seed(
            fingerprint(ctx.plan.config.training.seed, at.key.step, micro_step, ctx.rank.environment.rank)
        )
        ctx.injector.at("forward", at.key.step)
        # A filler's dummy has no target: any weight gives 0.
        losses.append(_micro_step(ctx, job, batch, [weights[i] for i in sample_ids] or [0.0], at))
        ctx.stopwatch.lap()
    at.enter("reserve")
    job.strategy.reserve()
    sizes = [data.lengths[list(micro)].tolist() for part in parts for micro in part if micro]
    return Part(
        mine=mine,
        works=_works(job, parts, mine),
        largest_tokens=max(map(job.collate.tokens, sizes)),
        longest_tokens=max(map(max, sizes)),
        losses=losses,
        targets=sum(int(data.n_targets[i]) for micro in mine for i in micro),
    )


def _works(job: Job, parts: tuple[MicroBatches, ...], mine: MicroBatches) -> tuple[Work, ...]:
    """As `Part` has them."""

    def work(micro: tuple[int, ...]) -> Work:
        return work_of(job.data.train.lengths[list(micro)].tolist(), padded=not job.collate.flat)

    if not job.strategy.lockstep:
        return tuple(map(work, mine))
    slots = zip(*parts, strict=True)
    return tuple(max(map(work, slot), key=lambda each: each.cost(job.cost)) for slot in slots)


def _micro_step(ctx: Context, job: Job, batch: ModelInputs, weights: list[float], at: Attempt) -> torch.Tensor:
    """Forward and backward of one micro-batch; its share of the loss, detached."""
    inputs, targets = split_off_targets(batch, [weight * job.scale.value for weight in weights], ctx.rank.device)
    loss, value = job.head.loss(job.strategy.forward, inputs, targets, ctx.injector.in_backward(at.key.step))
    if ctx.injector.poison(at.key.step, at.key.attempt):
        loss, value = loss * math.nan, value * math.nan
    at.enter("backward", micro_step=at.micro_step, sample_ids=at.sample_ids, tokens=at.tokens)
    job.strategy.backward(loss)
    return value / job.scale.value


def _weights(ctx: Context, job: Job, ids: tuple[int, ...]) -> dict[int, float]:
    """Weight of each sample in the loss of the global batch `ids`, by its id."""
    n_targets = job.data.train.n_targets
    if ctx.plan.config.training.loss_reduction == "sample":
        return {i: 1.0 / (int(n_targets[i]) * len(ids)) for i in ids}
    return dict.fromkeys(ids, 1.0 / int(n_targets[list(ids)].sum()))


def _reduce(ctx: Context, job: Job, step: int) -> float:
    """Sum the gradients over the ranks. A failure here leaves peers inside a collective."""

    def work() -> float:
        ctx.injector.at("reduce", step)
        return job.strategy.reduce()

    return half_done(ctx, "reduce", step, work)


def _not_finite(ctx: Context, vote: StepTally, part: Part, ids: tuple[int, ...], losses: list[float]) -> StopTraining:
    """The stop that names the step and the samples: those of the bad micro-batches, else the global batch's."""
    bad = [i for micro, loss in zip(part.mine, losses, strict=True) if not math.isfinite(loss) for i in micro]
    if bad:
        ctx.console.say(f"the loss of samples {bad} is not finite")
    stop = decide_step(ctx.policy, vote)
    assert isinstance(stop, Stop)
    rows = ctx.control.exchange([float(i) for i in bad[:ROW_WIDTH]] + [-1.0] * (ROW_WIDTH - len(bad[:ROW_WIDTH])))
    found = sorted({int(i) for row in rows for i in row if i >= 0}) or sorted(ids)
    return StopTraining(stop.reason, f"{stop.message}; samples {found}", stop.exit_code)
