"""What all ranks do after a failed attempt: go, retry with these caps, start anew from the checkpoint, or stop. Pure.

Every rank calls `decide` with the same state and the same tally and gets the same decision, so
nothing but the vote travels.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from allranks.caps import Caps
from allranks.config.schema import OomConfig
from allranks.coordinator.attempt import AttemptPhase
from allranks.coordinator.ballots import Ballot, StepTally, StepVerdict, Tally
from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.errors import ExitCode, StopTraining
from allranks.units import human_bytes, plural

LEAK_FAILURES = 4
"""So many memory failures without any growth in work are a leak."""
LEAK_WINDOW_STEPS = 100
"""Committed steps within which they must lie."""


@dataclass(frozen=True, kw_only=True)
class CapState:
    """The caps of training or of evaluation, and what is known to have fitted under them.

    Attributes:
        caps: what a micro-batch may hold.
        fitted_tokens: tokens, padding included, of the largest micro-batch that was finished on any rank.
        fitted_length: tokens of the longest sample that was.
        unexplained_at: committed steps at which a micro-batch failed for memory although a larger one had fitted;
            emptied when the work grows.
    """

    caps: Caps
    fitted_tokens: int = 0
    fitted_length: int = 0
    unexplained_at: tuple[int, ...] = ()

    def finished(self, *, largest_tokens: int, longest_tokens: int) -> CapState:
        """After an attempt that all ranks finished, with its largest micro-batch and longest sample in tokens."""
        grew = largest_tokens > self.fitted_tokens or longest_tokens > self.fitted_length
        return replace(
            self,
            fitted_tokens=max(self.fitted_tokens, largest_tokens),
            fitted_length=max(self.fitted_length, longest_tokens),
            unexplained_at=() if grew else self.unexplained_at,
        )

    def has_fitted(self, *, samples: int, tokens: int) -> bool:
        """Whether as much work as this micro-batch was finished before, by tokens and by length."""
        return tokens <= self.fitted_tokens and -(-tokens // samples) <= self.fitted_length

    def failed_unexplained(self, step: int) -> CapState:
        """After a memory failure of work that had fitted before."""
        recent = tuple(at for at in self.unexplained_at if step - at < LEAK_WINDOW_STEPS)
        return replace(self, unexplained_at=(*recent, step))

    def cut(self, *, samples: int, tokens: int) -> CapState:
        """Half of what the failing micro-batch held, or of the cap where that is less; never below 1."""
        held = tokens if self.caps.max_tokens is None else min(self.caps.max_tokens, tokens)
        caps = Caps(max_samples=max(1, min(self.caps.max_samples, samples) // 2), max_tokens=max(1, held // 2))
        return replace(self, caps=caps)


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What the policy remembers; the same on all ranks.

    Attributes:
        train: caps of training.
        evaluation: caps of evaluation.
        retries: retries of the attempt under way.
        retried_unchanged: one of them kept the caps; there is only one such retry.
    """

    train: CapState
    evaluation: CapState
    retries: int = 0
    retried_unchanged: bool = False

    @classmethod
    def start(cls, *, train: Caps, evaluation: Caps) -> PolicyState:
        """Nothing has been tried yet."""
        return cls(train=CapState(caps=train), evaluation=CapState(caps=evaluation))

    def side(self, phase: AttemptPhase) -> CapState:
        """The caps that this phase works under."""
        return self.evaluation if phase == "eval" else self.train

    def with_side(self, phase: AttemptPhase, side: CapState) -> PolicyState:
        """The same state with other caps for this phase."""
        return replace(self, evaluation=side) if phase == "eval" else replace(self, train=side)

    def finished(self, phase: AttemptPhase, *, largest_tokens: int = 0, longest_tokens: int = 0) -> PolicyState:
        """After a committed step, a finished evaluation or save: the next attempt has all its retries.

        Args:
            phase: what was finished.
            largest_tokens: tokens of its largest micro-batch on any rank, padding included; 0 for a save.
            longest_tokens: tokens of its longest sample on any rank; 0 for a save.
        """
        side = self.side(phase).finished(largest_tokens=largest_tokens, longest_tokens=longest_tokens)
        return replace(self.with_side(phase, side), retries=0, retried_unchanged=False)

    @property
    def caps(self) -> tuple[Caps, Caps]:
        """Of training and of evaluation."""
        return self.train.caps, self.evaluation.caps

    def within(self, other: PolicyState) -> PolicyState:
        """This state under the smaller caps of the two."""
        sides = ((self.train, other.train), (self.evaluation, other.evaluation))
        train, evaluation = (replace(mine, caps=mine.caps.within(theirs.caps)) for mine, theirs in sides)
        return replace(self, train=train, evaluation=evaluation)

    def to_json(self) -> str:
        """For the ranks of the next generation; `from_json` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PolicyState:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        for side in ("train", "evaluation"):
            given = fields[side]
            given |= {"caps": Caps(**given["caps"]), "unexplained_at": tuple(given["unexplained_at"])}
            fields[side] = CapState(**given)
        return cls(**fields)


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
    "shorten data.max_length, set training.gradient_checkpointing, adapt fewer lora.target_modules, "
    "or take another profile (zero3 and fsdp spread the model)"
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
    what = _what(tally, cause, rank, phase)
    own = TRAITS[cause.kind or FailureKind.OTHER].severity  # the ballot's is greater inside a collective
    in_place = can_retry and not tally.data_plane_damaged and tally.severity < Severity.STOP
    if own is Severity.STOP or (not in_place and not can_respawn):
        return _stop(cause, f"{what}; {_why_no_retry(tally, cause, can_retry)}")
    if phase == "load" and own < Severity.STOP:
        return _stop_loading(cause, what)
    if not in_place:
        return _anew(state, tally, cause, what, phase)
    if state.retries >= oom.max_retries_per_step:
        return _stop(cause, f"{what}; it still fails after {state.retries} retries (oom.max_retries_per_step)")
    state = replace(state, retries=state.retries + 1)
    if cause.memory and cause.samples > 0 and phase != "save":
        return _shrink(state, tally, cause, what, phase)
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


def _shrink(state: PolicyState, tally: Tally, cause: Ballot, what: str, phase: AttemptPhase) -> Retry | Stop:
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
                "growth in work: memory is leaking or another process takes it, and smaller micro-batches won't help",
            )
        state = state.with_side(phase, side)
    if cause.samples > 1:
        smaller = side.cut(samples=cause.samples, tokens=cause.tokens)
        caps = smaller.caps
        return Retry(
            state=state.with_side(phase, smaller),
            message=f"{what}; all ranks retry with at most {plural(caps.max_samples, 'sample')} and "
            f"{plural(caps.max_tokens or 0, 'token')} per micro-batch",
        )
    if unexplained and not state.retried_unchanged:
        return Retry(
            state=replace(state, retried_unchanged=True),
            message=f"{what}; all ranks retry once with nothing smaller to try",
        )
    return _stop(cause, f"{what}; a micro-batch of one sample can't be split: {_FLOOR_ADVICE}")


def _anew(state: PolicyState, tally: Tally, cause: Ballot, what: str, phase: AttemptPhase) -> Respawn | Stop:
    """Nothing can be retried in place: all ranks start again, with smaller micro-batches if memory was the cause."""
    kind = cause.kind or FailureKind.OTHER
    if cause.memory and cause.samples > 0 and phase != "save":
        decision = _shrink(state, tally, cause, what, phase)
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


_NAMES = {
    FailureKind.CUDA_OOM: "ran out of GPU memory",
    FailureKind.WORKSPACE_OOM: "found no GPU memory for a workspace",
    FailureKind.LIBRARY_AMBIGUOUS: "was refused by cuBLAS or cuDNN, perhaps for want of GPU memory",
    FailureKind.NCCL_OOM: "found no GPU memory for NCCL",
    FailureKind.HOST_OOM: "ran out of host memory (RAM)",
}
_DOING: dict[AttemptPhase, str] = {
    "load": "while loading",
    "step": "in step",
    "eval": "in the evaluation after step",
    "save": "in the save after step",
}


def _what(tally: Tally, cause: Ballot, rank: int, phase: AttemptPhase) -> str:
    """What failed, in one clause without a full stop."""
    kind = cause.kind or FailureKind.OTHER
    step = tally.committed_step + 1 if phase == "step" else tally.committed_step
    where = _DOING[phase] if phase == "load" else f"{_DOING[phase]} {step}"
    text = f"rank {rank} {_NAMES.get(kind, 'failed')} ({kind}) {where}"
    if cause.samples:
        text += f" on a micro-batch of {plural(cause.samples, 'sample')}, {plural(cause.tokens, 'token')}"
    asked = None if cause.bytes_asked is None else f"asked {human_bytes(cause.bytes_asked)}"
    free = None if cause.bytes_free is None else f"{human_bytes(cause.bytes_free)} free"
    figures = ", ".join(part for part in (asked, free) if part)
    return f"{text}: {figures}" if figures else text
