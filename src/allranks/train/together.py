"""One attempt of all ranks: each does its part under guard, all vote, and all do what the vote says."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import torch

from allranks.coordinator.agreement import ControlPlaneLost, vote_one
from allranks.coordinator.attempt import AttemptKey, AttemptPhase, Failed, run_attempt
from allranks.coordinator.ballots import Ballot, Tally, fingerprint
from allranks.coordinator.failure import classify, read_all
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import Go, Retry, Stop, decide
from allranks.errors import StopTraining
from allranks.train.context import Context

T = TypeVar("T")

_PEER_PATIENCE_S = 2.0
_SELF_EXPLAINED = (FailureKind.USER, FailureKind.STORAGE)
"""Kinds whose text was written for the user: nothing needs to be said beside it."""


@dataclass
class Attempt:
    """One attempt, and how far this rank is in its part of it, for the record of a failure.

    Attributes:
        key: its name, the same on all ranks.
        phase: what it is doing, e.g. ``backward``.
        micro_step: index of the micro-batch.
        sample_ids: samples of that micro-batch.
        tokens: its tokens, padding included.
    """

    key: AttemptKey
    phase: str
    micro_step: int | None = None
    sample_ids: tuple[int, ...] = ()
    tokens: int = 0


def together(
    ctx: Context,
    phase: AttemptPhase,
    step: int,
    work: Callable[[Attempt], T],
    *,
    collective: bool = False,
) -> tuple[T, Tally]:
    """Do `work` on all ranks until all have done it; what a vote decides is the same on all of them.

    Args:
        phase: what is tried.
        step: optimizer step it belongs to.
        work: this rank's part; must leave nothing behind that a second call could not overwrite.
        collective: `work` contains collectives of the data plane, so peers can't be reached by a vote.

    Returns:
        What this rank's `work` returned, and the vote that let it count.

    Raises:
        StopTraining: all ranks agreed to stop.
        ControlPlaneLost: a rank is gone.
    """
    attempt = 0
    while True:
        at = Attempt(key=ctx.key(phase, step, attempt), phase=phase)
        began = time.monotonic()
        outcome = run_attempt(partial(work, at), on_failure=print_traceback)
        ballot = Ballot(
            committed_step=ctx.committed_step,
            caps_fingerprint=fingerprint(ctx.policy.train.caps, ctx.policy.evaluation.caps),
            seconds=time.monotonic() - began,
            headroom_bytes=_headroom_bytes(ctx.rank.device),
            stop_requested=ctx.stop_wanted() is not None,
        )
        if isinstance(outcome, Failed):
            ballot = _failing(ctx, ballot, outcome, at, in_collective=collective)
            if collective:
                declare(ctx, ballot, at.key)
        tally = vote_one(ctx.control, ballot)
        decision = decide(ctx.policy, tally, ctx.plan.config.oom, phase=phase, can_retry=not collective)
        if isinstance(decision, Go):
            assert not isinstance(outcome, Failed)
            return outcome.value, tally
        if isinstance(decision, Stop):
            raise explained(ctx, decision, at.key, tally.cause_rank)
        _retry(ctx, decision, at.key, tally)
        attempt += 1


def _failing(ctx: Context, ballot: Ballot, failed: Failed, at: Attempt, *, in_collective: bool) -> Ballot:
    """Leave the record of this rank's own failure, wake the peers, and fill the ballot."""
    if not failed.classification.secondary:
        ctx.flag.raise_flag(at.key)
        ctx.record(
            failed,
            at.key,
            at.phase,
            micro_step=at.micro_step,
            samples=len(at.sample_ids),
            tokens=at.tokens,
            sample_ids=at.sample_ids,
        )
    return ballot.failing(
        failed.classification, samples=len(at.sample_ids), tokens=at.tokens, in_collective=in_collective
    )


def _retry(ctx: Context, decision: Retry, key: AttemptKey, tally: Tally) -> None:
    ctx.policy = decision.state
    caps = decision.state.side(key.phase).caps
    if ctx.is_main:
        ctx.console.say(decision.message)
    ctx.events.write(
        "retry",
        step=key.step,
        attempt=key.attempt + 1,
        phase=key.phase,
        failed_rank=tally.cause_rank,
        caps=[caps.max_samples, caps.max_tokens],
    )


def stop_half_done(ctx: Context, failed: Failed, key: AttemptKey, phase: str) -> NoReturn:
    """Stop all ranks: this one failed in or beside a collective of the data plane, outside an attempt."""
    ballot = Ballot(committed_step=ctx.committed_step, caps_fingerprint=0)
    declare(ctx, _failing(ctx, ballot, failed, Attempt(key=key, phase=phase), in_collective=True), key)


def explained(ctx: Context, stop: Stop, key: AttemptKey, cause_rank: int | None) -> StopTraining:
    """The stop with the words of the exception that caused it, which the failing rank left in its record.

    Of a lack of memory the stop itself tells everything; the whole text is in the record.
    """
    records = read_all(ctx.run_dir, launch=key.launch, step=key.step)
    words = next((r for r in reversed(records) if r.rank == cause_rank and r.attempt == key.attempt), None)
    if words is None or TRAITS[words.kind].memory:
        return stop.error()
    text = words.message.partition(": ")[2] if words.kind in _SELF_EXPLAINED else f"{stop.message}\n{words.message}"
    return StopTraining(stop.reason, text, stop.exit_code)


def declare(ctx: Context, ballot: Ballot, key: AttemptKey) -> NoReturn:
    """Stop all ranks through their watchers: this rank failed where its peers may sit in a collective."""
    me = ctx.rank.environment.rank
    well = Ballot(committed_step=ballot.committed_step, caps_fingerprint=ballot.caps_fingerprint)
    tally = Tally(ballots=tuple(ballot if rank == me else well for rank in range(ctx.world_size)))
    stop = decide(ctx.policy, tally, ctx.plan.config.oom, phase=key.phase, can_retry=not ctx.lockstep)
    assert isinstance(stop, Stop)
    if ballot.secondary:
        # A peer is gone, or has declared: then our own watcher ends us within this time.
        time.sleep(_PEER_PATIENCE_S)
        raise ControlPlaneLost(stop.message)
    error = explained(ctx, stop, key, me)
    if ctx.world_size == 1:
        raise error
    ctx.watcher.declare(json.dumps({"reason": error.reason, "message": str(error), "exit_code": int(error.exit_code)}))


def print_traceback(error: BaseException) -> None:
    """Into this rank's log, while the exception still has its frames, where its own text does not say enough."""
    what = classify(error)
    if not (what.memory or what.secondary or what.kind in _SELF_EXPLAINED):
        traceback.print_exception(error)


def _headroom_bytes(device: torch.device) -> int | None:
    """GPU memory that this process has never used so far."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory - torch.cuda.max_memory_reserved(device)
