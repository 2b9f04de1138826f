"""What the ranks say in the two votes of an attempt, and the verdicts drawn from it.

Everything here is pure: from the same ballots every rank draws the same verdict.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Self

from allranks.coordinator.failure import Classification
from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.errors import ExitCode, StopTraining

_KINDS = tuple(FailureKind)

_PLACES = (
    *("load", "data", "resume", "revive", "forward", "backward", "reserve", "reduce", "step"),
    *("eval", "save", "write", "publish", "final"),
)
"""Where a rank's part can fail, as it travels in a ballot; any other name is left out there."""

_GROWTH_SAFETY = 0.8
"""Of the headroom that is taken: memory is not quite proportional to the tokens of a micro-batch."""


class VotesDisagree(StopTraining):
    """The ranks are not where they believe to be; all of them raise this at the same vote."""

    def __init__(self, message: str) -> None:
        super().__init__("failure", f"the ranks disagree: {message}; this is a fault in allranks", ExitCode.CRASH)


def fingerprint(*values: object) -> int:
    """48 bits that tell whether ranks hold equal values; of their `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


def _maybe_int(number: float) -> int | None:
    return None if math.isnan(number) else int(number)


def _as_number(value: FailureKind | str | float | None) -> float:
    if isinstance(value, FailureKind):
        return float(_KINDS.index(value))
    if isinstance(value, str):
        return float(_PLACES.index(value)) if value in _PLACES else math.nan
    return math.nan if value is None else float(value)


def _maybe_kind(number: float) -> FailureKind | None:
    return None if math.isnan(number) else _KINDS[int(number)]


_DECODERS: dict[str, Callable[[float], Any]] = {  # by the annotation of a field
    "bool": bool,
    "int": int,
    "float": float,
    "int | None": _maybe_int,
    "str | None": lambda number: None if math.isnan(number) else _PLACES[int(number)],
    "Severity": lambda number: Severity(int(number)),
    "FailureKind | None": _maybe_kind,
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Base of what travels in a vote: each field is one number, None is NaN."""

    def to_row(self) -> list[float]:
        """The fields as numbers, in their order."""
        return [_as_number(getattr(self, name)) for name, _ in _columns(type(self))]  # type: ignore[arg-type]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Self:
        """Inverse of `to_row`."""
        pairs = zip(_columns(cls), row, strict=True)  # type: ignore[arg-type]
        return cls(**{name: decode(number) for (name, decode), number in pairs})


@cache  # mypy holds a class to the hash of its instances
def _columns(of: type[Any]) -> tuple[tuple[str, Callable[[float], Any]], ...]:
    return tuple((field.name, _DECODERS[str(field.type)]) for field in fields(of))


@dataclass(frozen=True, kw_only=True)
class Ballot(_Row):
    """What one rank says after its part of an attempt, before any gradient travels.

    Attributes:
        committed_step: last optimizer step this rank has made; must be the same on all.
        caps_fingerprint: `fingerprint` of the caps this attempt was split by; must be the same on all.
        failed: this rank did not finish its part.
        severity: what the failure asks of all ranks.
        kind: what went wrong.
        secondary: a peer's failure seen from here.
        data_plane_damaged: the communicators can't be used again.
        samples: samples in the failing micro-batch; 0 outside one.
        tokens: its tokens, padding included.
        bytes_asked: bytes the failing allocation wanted, if known.
        bytes_free: bytes that were free for it, if known.
        place: where in its part the rank failed, e.g. ``backward``, if that has a name.
        gpu: index of the GPU of a rank that failed; None on a CPU.
        sample_id: of the only sample in the failing micro-batch; None if it held more, or none.
        held_bytes: memory that was allocated when the attempt began (on a CPU, the resident set), if known.
        peak_bytes: GPU memory that was allocated at most during the attempt, if measured.
        headroom_bytes: what the GPU could have given beyond that peak, if measured.
        allocator_retries: how often the GPU's allocator had to free its cache during the attempt.
        seconds: what this rank's part took.
        stop_requested: someone asked this rank to stop (SIGTERM, `stop.request`).
    """

    committed_step: int
    caps_fingerprint: int
    failed: bool = False
    severity: Severity = Severity.NONE
    kind: FailureKind | None = None
    secondary: bool = False
    data_plane_damaged: bool = False
    samples: int = 0
    tokens: int = 0
    bytes_asked: int | None = None
    bytes_free: int | None = None
    place: str | None = None
    gpu: int | None = None
    sample_id: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    headroom_bytes: int | None = None
    allocator_retries: int = 0
    seconds: float = 0.0
    stop_requested: bool = False

    def failing(
        self,
        what: Classification,
        *,
        samples: int,
        tokens: int,
        in_collective: bool = False,
        place: str | None = None,
        gpu: int | None = None,
        sample_id: int | None = None,
    ) -> Ballot:
        """This ballot, of a rank that failed.

        Args:
            what: the class of the failure.
            samples: samples in the failing micro-batch; 0 outside one.
            tokens: its tokens, padding included.
            in_collective: it failed inside a collective of the data plane, which is now half-done.
            place: where in its part.
            gpu: index of its GPU; None on a CPU.
            sample_id: of the only sample in the failing micro-batch.
        """
        return replace(
            self,
            failed=True,
            severity=Severity.RESPAWN if in_collective else what.severity,
            kind=what.kind,
            secondary=what.secondary,
            data_plane_damaged=what.data_plane_damaged or in_collective,
            samples=samples,
            tokens=tokens,
            bytes_asked=what.bytes_asked,
            bytes_free=what.bytes_free,
            place=place,
            gpu=gpu,
            sample_id=sample_id,
        )

    @property
    def memory(self) -> bool:
        """The failure is one that less work at a time may cure."""
        return self.kind is not None and TRAITS[self.kind].memory


class Verdict(StrEnum):
    """What vote 1 asks for; whether a retry is granted, and with which caps, is the policy's decision."""

    GO = "go"
    RETRY = "retry"
    STOP = "stop"
    RESPAWN = "respawn"


_VERDICTS = {
    Severity.NONE: Verdict.GO,
    Severity.MEMORY: Verdict.RETRY,
    Severity.RETRY_ONCE: Verdict.RETRY,
    Severity.STOP: Verdict.STOP,
    Severity.RESPAWN: Verdict.RESPAWN,
}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What all ranks read from vote 1.

    Attributes:
        ballots: one per rank, in the order of ranks.
    """

    ballots: tuple[Ballot, ...]

    @property
    def failed(self) -> bool:
        """Some rank did not finish its part."""
        return any(ballot.failed for ballot in self.ballots)

    @property
    def severity(self) -> Severity:
        """The greatest of all ranks."""
        return max(ballot.severity for ballot in self.ballots)

    @property
    def verdict(self) -> Verdict:
        """What the greatest severity asks for."""
        return _VERDICTS[self.severity]

    @property
    def cause_rank(self) -> int | None:
        """The lowest of the most severely failed ranks whose failure is its own; None if none is."""
        own = [rank for rank, ballot in enumerate(self.ballots) if ballot.failed and not ballot.secondary]
        return min(own, key=lambda rank: (-self.ballots[rank].severity, rank), default=None)

    @property
    def cause(self) -> Ballot | None:
        """The ballot of `cause_rank`."""
        return None if self.cause_rank is None else self.ballots[self.cause_rank]

    @property
    def data_plane_damaged(self) -> bool:
        """Some rank can't use its communicators again."""
        return any(ballot.data_plane_damaged for ballot in self.ballots)

    @property
    def committed_step(self) -> int:
        """Last optimizer step, the same on all ranks."""
        return self.ballots[0].committed_step

    @property
    def headroom_bytes(self) -> int | None:
        """The least of all ranks that measured theirs."""
        return min((b.headroom_bytes for b in self.ballots if b.headroom_bytes is not None), default=None)

    @property
    def held_bytes(self) -> int | None:
        """The most that any rank held when the attempt began."""
        return max((b.held_bytes for b in self.ballots if b.held_bytes is not None), default=None)

    @property
    def pressed(self) -> bool:
        """The allocator of some rank had to free its cache to go on."""
        return any(ballot.allocator_retries > 0 for ballot in self.ballots)

    @property
    def growth_factor(self) -> float | None:
        """How much larger the largest micro-batch could have been on every rank, in tokens; None if one doesn't know.

        What an attempt needs beyond what was held before it is taken to be proportional to its tokens.
        """
        known = [factor for ballot in self.ballots if (factor := _growth_factor(ballot)) is not None]
        return min(known) if len(known) == len(self.ballots) else None

    @property
    def stop_requested(self) -> bool:
        """Some rank was asked to stop."""
        return any(ballot.stop_requested for ballot in self.ballots)


def _growth_factor(ballot: Ballot) -> float | None:
    if ballot.headroom_bytes is None or ballot.peak_bytes is None or ballot.held_bytes is None:
        return None
    return 1.0 + _GROWTH_SAFETY * max(0, ballot.headroom_bytes) / max(1, ballot.peak_bytes - ballot.held_bytes)


def tally_one(ballots: Sequence[Ballot]) -> Tally:
    """The verdict of vote 1: pure, the same on every rank.

    Raises:
        VotesDisagree: the ranks stand at different steps or split by different caps.
    """
    _require_equal("last committed step", [ballot.committed_step for ballot in ballots])
    _require_equal("fingerprint of the caps", [ballot.caps_fingerprint for ballot in ballots])
    return Tally(ballots=tuple(ballots))


@dataclass(frozen=True, kw_only=True)
class StepBallot(_Row):
    """What one rank says after the gradients were reduced, before the optimizer step.

    Attributes:
        committed_step: last optimizer step this rank has made; must be the same on all.
        caps_fingerprint: `fingerprint` of the caps this attempt was split by; must be the same on all.
        reduced: the gradients were reduced without an error.
        loss_sum: this rank's share of the loss; all shares add up to the global batch's.
        grad_norm: norm of the reduced gradient before clipping.
        tokens: target tokens this rank has put into its share.
        expected_tokens: target tokens of the whole global batch, as this rank knows them from the data.
    """

    committed_step: int
    caps_fingerprint: int
    reduced: bool
    loss_sum: float
    grad_norm: float
    tokens: int
    expected_tokens: int


class StepVerdict(StrEnum):
    """What vote 2 decides."""

    STEP = "step"
    NOT_FINITE = "not_finite"
    RESTORE = "restore"
    """A rank failed in the reduction: gradients and communicators are in doubt."""


@dataclass(frozen=True, kw_only=True)
class StepTally:
    """What all ranks read from vote 2.

    Attributes:
        ballots: one per rank, in the order of ranks.
    """

    ballots: tuple[StepBallot, ...]

    @property
    def not_reduced_ranks(self) -> tuple[int, ...]:
        """Ranks on which the reduction failed."""
        return tuple(rank for rank, ballot in enumerate(self.ballots) if not ballot.reduced)

    @property
    def not_finite_ranks(self) -> tuple[int, ...]:
        """Ranks whose own share of the loss is NaN or infinite; all of them if only the norm is."""
        losses = tuple(rank for rank, ballot in enumerate(self.ballots) if not math.isfinite(ballot.loss_sum))
        norms = tuple(rank for rank, ballot in enumerate(self.ballots) if not math.isfinite(ballot.grad_norm))
        return losses or norms

    @property
    def verdict(self) -> StepVerdict:
        """Step, or why not."""
        if self.not_reduced_ranks:
            return StepVerdict.RESTORE
        return StepVerdict.NOT_FINITE if self.not_finite_ranks else StepVerdict.STEP

    @property
    def loss_sum(self) -> float:
        """Loss of the global batch, the sum of all shares."""
        return math.fsum(ballot.loss_sum for ballot in self.ballots)

    @property
    def tokens(self) -> int:
        """Target tokens of the global batch."""
        return sum(ballot.tokens for ballot in self.ballots)


def tally_two(ballots: Sequence[StepBallot]) -> StepTally:
    """The verdict of vote 2: pure, the same on every rank.

    Raises:
        VotesDisagree: steps, caps or global batches differ, or a sample was lost or counted twice.
    """
    _require_equal("last committed step", [ballot.committed_step for ballot in ballots])
    _require_equal("fingerprint of the caps", [ballot.caps_fingerprint for ballot in ballots])
    _require_equal("target tokens of the global batch", [ballot.expected_tokens for ballot in ballots])
    tally = StepTally(ballots=tuple(ballots))
    if not tally.not_reduced_ranks and tally.tokens != ballots[0].expected_tokens:
        raise VotesDisagree(
            f"the global batch has {ballots[0].expected_tokens} target tokens but all ranks together "
            f"counted {tally.tokens}: a sample was lost or taken twice"
        )
    return tally


def _require_equal(what: str, values: Sequence[int]) -> None:
    if min(values) != max(values):
        raise VotesDisagree(f"{what} by rank is {list(values)}")
