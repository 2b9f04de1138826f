"""What the policy remembers: the same on all ranks, small, and able to travel through JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from allranks.caps import Caps
from allranks.coordinator.attempt import AttemptPhase
from allranks.coordinator.ballots import Tally
from allranks.coordinator.memory_trend import MemoryTrend

LEAK_WINDOW_STEPS = 100
"""Committed steps within which the failures of a leak must lie."""
GROW_AFTER_STEPS = 20
"""Steps without a change before the caps first grow back."""


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
class Growth:
    """When the caps of training may grow again, and how far.

    Attributes:
        ceiling: the caps as configured.
        changed_at: committed step at which the caps last changed.
        grew: that change made them larger.
        patience_steps: steps without a change before they grow; doubled by each growth that did not last.
    """

    ceiling: Caps
    changed_at: int = 0
    grew: bool = False
    patience_steps: int = GROW_AFTER_STEPS

    def shrunk(self, step: int) -> Growth:
        """After the caps were made smaller."""
        patience = self.patience_steps * 2 if self.grew else self.patience_steps
        return replace(self, changed_at=step, grew=False, patience_steps=patience)

    def grown(self, step: int) -> Growth:
        """After the caps were made larger."""
        return replace(self, changed_at=step, grew=True)


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What the policy remembers; the same on all ranks.

    Attributes:
        train: caps of training.
        evaluation: caps of evaluation.
        growth: when the caps of training grow back.
        checkpointing: activations are recomputed in backward.
        skipped: samples of the training set that are left out, because not even one alone fitted.
        pressed_at: recent committed steps in which the GPU's allocator had to free its cache to go on.
        trend: memory held between attempts.
        retries: retries of the attempt under way.
        retried_unchanged: one of them kept everything as it was; there is only one such retry.
    """

    train: CapState
    evaluation: CapState
    growth: Growth
    checkpointing: bool = True
    skipped: tuple[int, ...] = ()
    pressed_at: tuple[int, ...] = ()
    trend: MemoryTrend = field(default_factory=MemoryTrend)
    retries: int = 0
    retried_unchanged: bool = False

    @classmethod
    def start(cls, *, train: Caps, evaluation: Caps, checkpointing: bool = True) -> PolicyState:
        """Nothing has been tried yet.

        Args:
            train: caps of training as configured.
            evaluation: caps of evaluation as configured.
            checkpointing: gradient checkpointing is on, or nobody can turn it on.
        """
        return cls(
            train=CapState(caps=train),
            evaluation=CapState(caps=evaluation),
            growth=Growth(ceiling=train),
            checkpointing=checkpointing,
        )

    def resumed(
        self, *, step: int, train: Caps, evaluation: Caps, checkpointing: bool, skipped: tuple[int, ...]
    ) -> PolicyState:
        """This first state with what the ranks had agreed on at committed step `step`."""
        return replace(
            self,
            train=CapState(caps=train),
            evaluation=CapState(caps=evaluation),
            growth=replace(self.growth, changed_at=step),
            checkpointing=checkpointing,
            skipped=skipped,
        )

    def side(self, phase: AttemptPhase) -> CapState:
        """The caps that this phase works under."""
        return self.evaluation if phase == "eval" else self.train

    def with_side(self, phase: AttemptPhase, side: CapState) -> PolicyState:
        """The same state with other caps for this phase."""
        return replace(self, evaluation=side) if phase == "eval" else replace(self, train=side)

    def observed(self, phase: AttemptPhase, tally: Tally) -> PolicyState:
        """After a vote, whatever it decides: with the memory that the ranks held when the attempt began."""
        return replace(self, trend=self.trend.began(phase, tally.committed_step, tally.held_bytes))

    def finished(self, phase: AttemptPhase, *, largest_tokens: int = 0, longest_tokens: int = 0) -> PolicyState:
        """After a committed step, a finished evaluation or save: the next attempt has all its retries.

        Args:
            phase: what was finished.
            largest_tokens: tokens of its largest micro-batch on any rank, padding included; 0 for a save.
            longest_tokens: tokens of its longest sample on any rank; 0 for a save.
        """
        side = self.side(phase).finished(largest_tokens=largest_tokens, longest_tokens=longest_tokens)
        return replace(self.with_side(phase, side), retries=0, retried_unchanged=False)

    def lighter(self, step: int, *, samples: int, tokens: int) -> PolicyState | None:
        """With smaller micro-batches in training than the one that failed, or, if that was of one sample, with gradient
        checkpointing; None if that is on already.

        Args:
            step: last committed step.
            samples: of the failing micro-batch.
            tokens: its tokens, padding included.
        """
        if samples > 1:
            train = self.train.cut(samples=samples, tokens=tokens)
            return replace(self, train=train, growth=self.growth.shrunk(step))
        return None if self.checkpointing else replace(self, checkpointing=True)

    @property
    def footprint(self) -> tuple[Caps, Caps, bool, tuple[int, ...]]:
        """All that decides how much memory the work takes; must be the same on all ranks."""
        return self.train.caps, self.evaluation.caps, self.checkpointing, self.skipped

    def within(self, other: PolicyState) -> PolicyState:
        """This state with the smaller footprint of the two in each respect."""
        sides = ((self.train, other.train), (self.evaluation, other.evaluation))
        train, evaluation = (replace(mine, caps=mine.caps.within(theirs.caps)) for mine, theirs in sides)
        return replace(
            self,
            train=train,
            evaluation=evaluation,
            checkpointing=self.checkpointing or other.checkpointing,
            skipped=tuple(sorted({*self.skipped, *other.skipped})),
        )

    def reborn(self) -> PolicyState:
        """For ranks that have just started: what their processes hold has nothing to do with the last ones'."""
        return replace(self, trend=MemoryTrend())

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
        growth = fields["growth"]
        fields["growth"] = Growth(**{**growth, "ceiling": Caps(**growth["ceiling"])})
        fields["trend"] = MemoryTrend.from_dict(fields["trend"])
        return cls(**{**fields, "skipped": tuple(fields["skipped"]), "pressed_at": tuple(fields["pressed_at"])})
