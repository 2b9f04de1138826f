"""The evaluation loss: every sample of the set counted once, whatever the ranks and caps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from allranks.batches.split import split
from allranks.train.context import Context
from allranks.train.job import Job
from allranks.train.loss import split_off_targets
from allranks.train.together import Attempt, together


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one pass over the evaluation set.

    Attributes:
        loss: mean over all target tokens (causal-lm) or samples (sequence-classification).
        samples: in the set; each was counted once.
        targets: target tokens in the set.
        seconds: of the slowest rank.
    """

    loss: float
    samples: int
    targets: int
    seconds: float


def evaluate(ctx: Context, job: Job, step: int) -> Evaluation:
    """Evaluate the model of committed step `step`; an OOM shrinks the evaluation's caps alone.

    Raises:
        StopTraining: the policy stops.
    """
    data = job.data.eval
    assert data is not None
    (loss_sum, samples, seconds, largest), _ = together(
        ctx,
        "eval",
        step,
        lambda at: _pass(ctx, job, at),
        collective=job.strategy.lockstep and ctx.world_size > 1,
    )
    rows = ctx.control.exchange([loss_sum, float(samples), seconds])
    counted = int(sum(row[1] for row in rows))
    if counted != len(data):
        raise AssertionError(f"{counted} samples evaluated of {len(data)}")
    targets = int(data.n_targets.sum())
    ctx.policy = ctx.policy.finished("eval", largest_tokens=largest, longest_tokens=int(data.lengths.max()))
    return Evaluation(
        loss=sum(row[0] for row in rows) / targets,
        samples=counted,
        targets=targets,
        seconds=max(row[2] for row in rows),
    )


def _pass(ctx: Context, job: Job, at: Attempt) -> tuple[float, int, float, int]:
    """This rank's share: summed loss, samples, seconds, and the largest micro-batch of any rank in tokens."""
    began = time.monotonic()
    data = job.data.eval
    assert data is not None
    parts = split(
        data.lengths.tolist(),
        world_size=ctx.world_size,
        caps=ctx.policy.evaluation.caps,
        lockstep=job.strategy.lockstep,
        cost=job.cost,
        padded=not job.collate.flat,
    )
    mine = parts[ctx.rank.environment.rank]
    total = torch.zeros((), dtype=torch.float64, device=ctx.rank.device)
    job.strategy.train_mode(False)
    with torch.no_grad():
        for micro_step, sample_ids in enumerate(mine):
            if micro_step > 0 and not job.strategy.lockstep:
                ctx.flag.leave_if_raised(at.key)
            batch = job.collate([data.arrays(i) for i in sample_ids])
            tokens = job.collate.tokens(data.lengths[list(sample_ids)].tolist())
            at.enter("eval", micro_step=micro_step, sample_ids=sample_ids, tokens=tokens)
            ctx.injector.at("eval", at.key.step)
            inputs, targets = split_off_targets(batch, [1.0] * max(1, len(sample_ids)), ctx.rank.device)
            total += job.head.loss(job.strategy.forward, inputs, targets)[1].double()
    largest = max(job.collate.tokens(data.lengths[list(micro)].tolist()) for part in parts for micro in part if micro)
    return float(total), sum(len(micro) for micro in mine), time.monotonic() - began, largest
