"""One attempt of all ranks: each does its part under guard, all vote, and all do what the vote says."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from allranks.coordinator.agreement import ControlPlaneLost, vote_one
from allranks.coordinator.attempt import AttemptKey, AttemptPhase, Failed, run_attempt
from allranks.coordinator.autopsy import LastWords, write_caps, write_last_words
from allranks.coordinator.ballots import Ballot, Tally, fingerprint
from allranks.coordinator.failure import classify, read_all
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import Go, Respawn, Retry, Stop, decide
from allranks.coordinator.respawn import Death
from allranks.errors import AllranksError, ExitCode, StopTraining
from allranks.train.context import Context
from allranks.train.occupants import other_processes

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
        entered: told when another phase or micro-batch begins.
        micro_step: index of the micro-batch.
        sample_ids: samples of that micro-batch.
        tokens: its tokens, padding included.
    """

    key: AttemptKey
    phase: str
    entered: Callable[[str, int, int, int], None]
    micro_step: int | None = None
    sample_ids: tuple[int, ...] = ()
    tokens: int = 0

    def enter(
        self, phase: str, *, micro_step: int | None = None, sample_ids: tuple[int, ...] = (), tokens: int = 0
    ) -> None:
        """Go on to another phase, or to another micro-batch."""
        self.phase, self.micro_step, self.sample_ids, self.tokens = phase, micro_step, sample_ids, tokens
        self.entered(phase, self.key.step, len(sample_ids), tokens)


class RespawnNow(AllranksError):
    """This rank leaves with all others, to be started again with them; the last words are written."""

    exit_code = ExitCode.RANK_LOST


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
        RespawnNow: all ranks leave, to be started again.
        ControlPlaneLost: a rank is gone.
    """
    attempt = 0
    while True:
        at = Attempt(key=ctx.key(phase, step, attempt), phase=phase, entered=ctx.entered)
        at.enter(phase)
        ctx.meter.begin()
        began = time.monotonic()
        with ctx.pulse.waiting("a collective") if collective else nullcontext():
            outcome = run_attempt(partial(work, at), on_failure=partial(_seen, ctx))
        seconds = time.monotonic() - began
        may_grow = phase == "step" and ctx.policy.train.caps != ctx.policy.growth.ceiling
        ballot = Ballot(
            committed_step=ctx.committed_step,
            caps_fingerprint=fingerprint(ctx.policy.footprint),
            seconds=seconds,
            stop_requested=ctx.stop_wanted() is not None,
            **vars(ctx.meter.end(headroom=may_grow)),
        )
        if isinstance(outcome, Failed):
            ballot = _failing(ctx, ballot, outcome, at, in_collective=collective)
            if collective:
                declare(ctx, ballot, at)
        if phase == "step":
            ctx.entered("vote", step, 0, 0)
            ctx.injector.at("vote", step)
        tally = vote_one(ctx.control, ballot)
        ctx.policy = ctx.policy.observed(phase, tally)
        decision = decide(
            ctx.policy,
            tally,
            ctx.plan.config.oom,
            phase=phase,
            can_retry=not collective,
            can_respawn=ctx.can_respawn,
        )
        if isinstance(decision, Go):
            assert not isinstance(outcome, Failed)
            return outcome.value, tally
        if isinstance(decision, Stop):
            raise explained(ctx, decision, at.key, tally.cause_rank)
        if isinstance(decision, Respawn):
            if tally.cause_rank == ctx.rank.environment.rank:
                last_words(ctx, decision, failed_rank=tally.cause_rank, step=step, phase=at.phase)
            raise RespawnNow(decision.message)
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
            gpu_processes=_in_the_way(ctx, failed, at),
        )
    return ballot.failing(
        failed.classification,
        samples=len(at.sample_ids),
        tokens=at.tokens,
        in_collective=in_collective,
        place=at.phase,
        gpu=ctx.rank.device.index if ctx.rank.device.type == "cuda" else None,
        sample_id=at.sample_ids[0] if len(at.sample_ids) == 1 else None,
    )


def _in_the_way(ctx: Context, failed: Failed, at: Attempt) -> tuple[str, ...]:
    """Who else is on the GPU, if this rank found no room while it loaded."""
    if at.key.phase != "load" or not failed.classification.memory:
        return ()
    return other_processes(ctx.rank.device)


def _retry(ctx: Context, decision: Retry, key: AttemptKey, tally: Tally) -> None:
    ctx.policy = decision.state
    remember_caps(ctx)
    caps = decision.state.side(key.phase).caps
    if ctx.is_main:
        ctx.console.say(decision.message)
    ctx.events.write(
        "retry",
        step=key.step,
        attempt=key.attempt + 1,
        phase=key.phase,
        failed_rank=tally.cause_rank,
        message=decision.message,
        caps=[caps.max_samples, caps.max_tokens],
        gradient_checkpointing=decision.state.checkpointing,
        skipped_samples=list(decision.state.skipped),
    )


def half_done(ctx: Context, phase: str, step: int, work: Callable[[], T]) -> T:
    """Do what is never retried in place: a failure in it leaves a collective, or the step, half-done on some ranks.

    Raises:
        StopTraining: with one rank: it stops.
        RespawnNow: with one rank: it starts again.
    """
    at = Attempt(key=ctx.key("step", step, 0), phase=phase, entered=ctx.entered)
    at.enter(phase)
    with ctx.pulse.waiting("a collective"):
        outcome = run_attempt(work, on_failure=partial(_seen, ctx))
    if isinstance(outcome, Failed):
        ballot = Ballot(committed_step=ctx.committed_step, caps_fingerprint=0)
        declare(ctx, _failing(ctx, ballot, outcome, at, in_collective=True), at)
    return outcome.value


def last_words(ctx: Context, decision: Respawn, *, failed_rank: int | None, step: int, phase: str) -> None:
    """Leave the reason for the ranks of the next generation.

    Args:
        decision: what failed, and what to go on with.
        failed_rank: whose failure it was; None if nobody knows.
        step: optimizer step that was being tried.
        phase: where in it.
    """
    death = Death(
        kind=decision.kind,
        message=decision.message,
        rank=failed_rank,
        step=step,
        phase=phase,
        committed_step=ctx.committed_step,
        cut=decision.state.footprint != ctx.policy.footprint,
    )
    words = LastWords(death=death, state=decision.state)
    rank = ctx.rank.environment.rank
    try:
        write_last_words(ctx.run_dir, words, launch=ctx.launch, generation=ctx.generation, rank=rank)
    except OSError as error:
        ctx.console.say(f"the reason of the restart could not be written: {error.strerror}")


def remember_caps(ctx: Context) -> None:
    """Keep the caps on disk, for ranks that have to start again without last words."""
    if not (ctx.is_main and ctx.can_respawn):
        return
    try:
        write_caps(ctx.run_dir, ctx.policy, launch=ctx.launch)
    except OSError as error:
        ctx.console.say(f"the caps could not be written for a restart: {error.strerror}")


def explained(ctx: Context, stop: Stop, key: AttemptKey, cause_rank: int | None) -> StopTraining:
    """The stop with the words of the exception that caused it, which the failing rank left in its record.

    Of a lack of memory the stop itself tells everything; the whole text is in the record.
    """
    own = [ctx.last_failure] if ctx.last_failure is not None and ctx.last_failure.step == key.step else []
    records = [*own, *read_all(ctx.run_dir, launch=key.launch, step=key.step)]
    mine = (cause_rank, key.generation, key.attempt)
    words = next((r for r in reversed(records) if (r.rank, r.generation, r.attempt) == mine), None)
    if words is not None and words.gpu_processes:
        others = "; ".join(words.gpu_processes)
        return StopTraining(stop.reason, f"{stop.message}\n    also on this GPU: {others}", stop.exit_code)
    if words is None or TRAITS[words.kind].memory:
        return stop.error()
    text = words.message.partition(": ")[2] if words.kind in _SELF_EXPLAINED else f"{stop.message}\n{words.message}"
    return StopTraining(stop.reason, text, stop.exit_code)


def declare(ctx: Context, ballot: Ballot, at: Attempt) -> NoReturn:
    """End all ranks through their watchers: this one failed where its peers may sit in a collective."""
    key = at.key
    me = ctx.rank.environment.rank
    well = Ballot(committed_step=ballot.committed_step, caps_fingerprint=ballot.caps_fingerprint)
    tally = Tally(ballots=tuple(ballot if rank == me else well for rank in range(ctx.world_size)))
    decision = decide(
        ctx.policy,
        tally,
        ctx.plan.config.oom,
        phase=key.phase,
        can_retry=not ctx.lockstep,
        can_respawn=ctx.can_respawn,
    )
    assert isinstance(decision, Stop | Respawn)
    if ballot.secondary:
        # A peer is gone, or has declared: then our own watcher ends us within this time.
        time.sleep(_PEER_PATIENCE_S)
        raise ControlPlaneLost(decision.message)
    if isinstance(decision, Respawn):
        last_words(ctx, decision, failed_rank=me, step=key.step, phase=at.phase)
        if ctx.world_size == 1:
            raise RespawnNow(decision.message)
        ctx.watcher.declare(json.dumps({"respawn": decision.message}))
    error = explained(ctx, decision, key, me)
    if ctx.world_size == 1:
        raise error
    ctx.watcher.declare(json.dumps({"reason": error.reason, "message": str(error), "exit_code": int(error.exit_code)}))


def _seen(ctx: Context, error: BaseException) -> None:
    """While the exception still has its frames, and they all that did not fit."""
    print_traceback(error)
    if not classify(error).memory:
        return
    try:
        snapshot = ctx.first_oom.write()
    except (OSError, RuntimeError) as refused:
        ctx.console.say(f"what the GPU's memory held could not be written: {refused}")
    else:
        if snapshot is not None:
            ctx.console.say(f"what the GPU's memory held is in {snapshot}, for https://pytorch.org/memory_viz")


def print_traceback(error: BaseException) -> None:
    """Into this rank's log, while the exception still has its frames, where its own text does not say enough."""
    what = classify(error)
    if not (what.memory or what.secondary or what.kind in _SELF_EXPLAINED):
        traceback.print_exception(error)
