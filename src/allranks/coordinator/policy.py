"""What all ranks do after a failed attempt: go, retry with these caps, start anew from the checkpoint, or stop. Pure.

Every rank calls `decide` with the same state and the same tally and gets the same decision, so
nothing but the vote travels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from allranks.config.schema import OomConfig
from allranks.coordinator.attempt import AttemptPhase
from allranks.coordinator.ballots import Ballot, StepTally, StepVerdict, Tally
from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.coordinator.policy_state import LEAK_WINDOW_STEPS, PolicyState
from allranks.coordinator.words import what_failed
from allranks.errors import ExitCode, StopTraining

LEAK_FAILURES = 4
"""So many memory failures within `LEAK_WINDOW_STEPS` without any growth in work are a leak."""


@dataclass(frozen=True, kw_only=True)
class Go:
    """All ranks have finished their parts.

    Attributes:
        state: unchanged.
    """

    state: PolicyState


@dataclass(frozen=True, kw_only=True)
class Retry:
    """All ranks try the same work again.

    Attributes:
        state: what to go on with; its caps may be smaller.
        message: one line for the console: what failed, where, and what is done.
    """

    state: PolicyState
    message: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """All ranks leave.

    Attributes:
        reason: short machine-readable cause, e.g. ``out_of_memory``.
        message: what failed, where, and what to change; the same on all ranks.
        exit_code: what `allranks` returns for it.
    """

    reason: str
    message: str
    exit_code: ExitCode

    def error(self) -> StopTraining:
        """This stop as the exception that ends the loop."""
        return StopTraining(self.reason, self.message, self.exit_code)


@dataclass(frozen=True, kw_only=True)
class Respawn:
    """All ranks leave, are started again, and go on from the last checkpoint.

    Attributes:
        state: what to go on with; its caps may be smaller.
        kind: what failed.
        message: what failed and where, in one clause.
    """

    state: PolicyState
    kind: FailureKind
    message: str


Decision = Go | Retry | Respawn | Stop

_LOAD_ADVICE = (
    "free the GPU of other processes, give each rank a GPU of its own, take a smaller model, or a profile that spreads "
    "it over more GPUs (zero3, fsdp)"
)
_FLOOR_ADVICE = (
    "shorten data.max_length, let such samples be left out (oom.max_skipped_samples), adapt fewer "
    "lora.target_modules, or take another profile (zero3 and fsdp spread the model)"
)


def decide(
    state: PolicyState,
    tally: Tally,
    oom: OomConfig,
    *,
    phase: AttemptPhase = "step",
    can_retry: bool = True,
    can_respawn: bool = False,
) -> Decision:
    """What all ranks do after vote 1.

    Args:
        state: what the policy remembers.
        tally: the vote.
        oom: bounds set by the user.
        phase: what was tried.
        can_retry: the profile leaves no collective half-done when a rank fails in its part (`single`, `ddp`, `zero2`).
        can_respawn: whoever started the ranks starts them again when they leave.
    """
    if not tally.failed:
        return Go(state=state)
    cause, rank = tally.cause, tally.cause_rank
    if cause is None or rank is None:
        lost = [failed for failed, ballot in enumerate(tally.ballots) if ballot.failed]
        return Stop(
            reason="failure",
            message=f"ranks {lost} lost a peer and no rank knows why; look into the rank logs",
            exit_code=ExitCode.RANK_LOST,
        )
    what = what_failed(tally, cause, rank, phase)
    own = TRAITS[cause.kind or FailureKind.OTHER].severity  # the ballot's is greater inside a collective
    in_place = can_retry and not tally.data_plane_damaged and tally.severity < Severity.STOP
    if own is Severity.STOP or (not in_place and not can_respawn):
        return _stop(cause, f"{what}; {_why_no_retry(tally, cause, can_retry)}")
    if phase == "load" and own < Severity.STOP:
        return _stop_loading(cause, what)
    if not in_place:
        return _anew(state, tally, cause, what, phase, oom)
    if state.retries >= oom.max_retries_per_step:
        return _stop(cause, f"{what}; it still fails after {state.retries} retries (oom.max_retries_per_step)")
    state = replace(state, retries=state.retries + 1)
    if cause.memory and cause.samples > 0 and phase != "save":
        return _shrink(state, tally, cause, what, phase, oom)
    return _once(state, cause, what)


def decide_step(state: PolicyState, tally: StepTally) -> Go | Stop:
    """What all ranks do after vote 2; a failure here is never retried in place."""
    step = tally.ballots[0].committed_step + 1
    if tally.verdict is StepVerdict.RESTORE:
        return Stop(
            reason="failure",
            message=f"step {step}: the gradients could not be reduced on ranks {list(tally.not_reduced_ranks)}; "
            "the run resumes from its last checkpoint",
            exit_code=ExitCode.CRASH,
        )
    if tally.verdict is StepVerdict.NOT_FINITE:
        return Stop(
            reason="not_finite",
            message=f"step {step}: loss or gradient norm is not finite on ranks {list(tally.not_finite_ranks)}; "
            f"{TRAITS[FailureKind.NOT_FINITE].advice}",
            exit_code=ExitCode.DIVERGED,
        )
    return Go(state=state)


def _shrink(
    state: PolicyState, tally: Tally, cause: Ballot, what: str, phase: AttemptPhase, oom: OomConfig
) -> Retry | Stop:
    """Memory failed while a micro-batch was worked on."""
    side = state.side(phase)
    unexplained = side.has_fitted(samples=cause.samples, tokens=cause.tokens)
    if unexplained:
        side = side.failed_unexplained(tally.committed_step)
        what = f"{what}, although {side.fitted_tokens} tokens had fitted"
        if len(side.unexplained_at) >= LEAK_FAILURES:
            return _stop(
                cause,
                f"{what}; the {len(side.unexplained_at)}th such failure in {LEAK_WINDOW_STEPS} steps without any "
                "growth in work: memory is leaking or another process takes it, and smaller micro-batches won't help; "
                f"{state.trend.words()}",
            )
        state = state.with_side(phase, side)
    if cause.samples == 1:
        return _at_one_sample(state, cause, what, phase, oom, unexplained=unexplained)
    side = side.cut(samples=cause.samples, tokens=cause.tokens)
    state = state.with_side(phase, side)
    if phase == "step":
        state = replace(state, growth=state.growth.shrunk(tally.committed_step))
    return Retry(
        state=state,
        message=f"{what}; all ranks retry with {side.caps.words()}",
    )


def _at_one_sample(
    state: PolicyState, cause: Ballot, what: str, phase: AttemptPhase, oom: OomConfig, *, unexplained: bool
) -> Retry | Stop:
    """What is left when a micro-batch can't be split, the cheapest first."""
    if unexplained and not state.retried_unchanged:
        return Retry(
            state=replace(state, retried_unchanged=True),
            message=f"{what}; all ranks retry once with nothing smaller to try",
        )
    if phase == "step" and not state.checkpointing:
        return Retry(
            state=replace(state, checkpointing=True),
            message=f"{what}; a micro-batch of one sample can't be split: all ranks turn on gradient checkpointing, "
            "from here on, and retry",
        )
    if phase == "step" and cause.sample_id is not None and len(state.skipped) < oom.max_skipped_samples:
        return Retry(
            state=replace(state, skipped=tuple(sorted({*state.skipped, cause.sample_id}))),
            message=f"{what}; all ranks leave sample {cause.sample_id} out, from here on, and retry "
            f"({len(state.skipped) + 1} of {oom.max_skipped_samples}, oom.max_skipped_samples)",
        )
    used = f"; {len(state.skipped)} were left out already (oom.max_skipped_samples)" if state.skipped else ""
    return _stop(cause, f"{what}; a micro-batch of one sample can't be split{used}: {_FLOOR_ADVICE}")


def _anew(
    state: PolicyState, tally: Tally, cause: Ballot, what: str, phase: AttemptPhase, oom: OomConfig
) -> Respawn | Stop:
    """Nothing can be retried in place: all ranks start again, with less work at a time if memory was the cause."""
    kind = cause.kind or FailureKind.OTHER
    if cause.memory and cause.samples > 0 and phase != "save":
        decision = _shrink(state, tally, cause, what, phase, oom)
        if isinstance(decision, Stop):
            return decision
        state = decision.state
    return Respawn(state=state, kind=kind, message=what)


def _once(state: PolicyState, cause: Ballot, what: str) -> Retry | Stop:
    """Smaller micro-batches would not help: retry unchanged, once."""
    nature = "" if cause.memory else " (not a memory fault)"
    if state.retried_unchanged:
        return _stop(cause, f"{what}{nature}; it failed twice: {_advice(cause)}")
    return Retry(
        state=replace(state, retried_unchanged=True), message=f"{what}{nature}; all ranks retry once, unchanged"
    )


def _stop(cause: Ballot, message: str) -> Stop:
    if cause.kind is FailureKind.NOT_FINITE:
        return Stop(reason="not_finite", message=message, exit_code=ExitCode.DIVERGED)
    if cause.kind is FailureKind.STORAGE:
        return Stop(reason="storage", message=message, exit_code=ExitCode.STORAGE)
    if cause.kind in (FailureKind.USER, FailureKind.DATA):
        return Stop(reason="failure", message=message, exit_code=ExitCode.USAGE)
    if cause.memory and cause.kind is not FailureKind.LIBRARY_AMBIGUOUS:
        return Stop(reason="out_of_memory", message=message, exit_code=ExitCode.OUT_OF_MEMORY)
    return Stop(reason="failure", message=message, exit_code=ExitCode.CRASH)


def _stop_loading(cause: Ballot, what: str) -> Stop:
    """Loading has nothing to make smaller; what doesn't fit together is the user's to put right."""
    if cause.memory:
        return _stop(cause, f"{what}; not even the model fits: {_LOAD_ADVICE}")
    stop = _stop(cause, f"{what}; {_advice(cause)}")
    if cause.kind in (FailureKind.SIZE_MISMATCH, FailureKind.DTYPE_MISMATCH):
        return replace(stop, exit_code=ExitCode.USAGE)
    return stop


def _why_no_retry(tally: Tally, cause: Ballot, can_retry: bool) -> str:
    advice = _advice(cause)
    if cause.severity is Severity.STOP or not cause.memory:
        return advice
    if tally.data_plane_damaged:
        return f"a collective was left half-done and can't be retried in place: {advice}"
    if not can_retry:
        return f"this profile can't retry in place, ddp and zero2 can: {advice}"
    return advice


def _advice(cause: Ballot) -> str:
    return TRAITS[cause.kind or FailureKind.OTHER].advice
