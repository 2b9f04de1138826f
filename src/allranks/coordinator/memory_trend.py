"""Whether the memory that a run holds between its attempts grows, by how much a step, and in which phase. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from allranks.coordinator.attempt import AttemptPhase
from allranks.units import human_bytes

_MOST_POINTS = 64
_LEAST_POINTS = 8
_WARM_UP_ATTEMPTS = 2
"""The first steps allocate what stays: optimizer state, workspaces, buffers."""
_NEGLIGIBLE = 0.01
_IN_WORDS: dict[AttemptPhase, str] = {
    "load": "while loading",
    "step": "in training steps",
    "eval": "in evaluations",
    "save": "in saves",
}


@dataclass(frozen=True, kw_only=True)
class MemoryTrend:
    """Memory held at the start of attempts, by the rank that holds most; of one life of the ranks.

    Attributes:
        points: (committed step, bytes) at the start of training steps, at most 64, oldest first.
        grown_bytes: by phase, how much more was held after its attempts than before them.
        last: phase and bytes of the last attempt.
        attempts: training steps that were begun.
    """

    points: tuple[tuple[int, int], ...] = ()
    grown_bytes: tuple[tuple[AttemptPhase, int], ...] = ()
    last: tuple[AttemptPhase, int] | None = None
    attempts: int = 0

    def began(self, phase: AttemptPhase, step: int, held_bytes: int | None) -> MemoryTrend:
        """With one more attempt, which began after committed step `step`; unchanged where nothing was measured."""
        if held_bytes is None:
            return self
        grown, points = dict(self.grown_bytes), self.points
        warm = self.attempts >= _WARM_UP_ATTEMPTS
        if self.last is not None and warm:
            before, bytes_before = self.last
            grown[before] = grown.get(before, 0) + held_bytes - bytes_before
        if phase == "step" and warm:
            points = (*(points if len(points) < _MOST_POINTS else points[::2]), (step, held_bytes))
        return replace(
            self,
            points=points,
            grown_bytes=tuple(sorted(grown.items())),
            last=(phase, held_bytes),
            attempts=self.attempts + (phase == "step"),
        )

    @property
    def slope_bytes(self) -> float | None:
        """Bytes per step by least squares; None with too few points to say."""
        if len(self.points) < _LEAST_POINTS or self.points[0][0] == self.points[-1][0]:
            return None
        steps, held = zip(*self.points, strict=True)
        return statistics.linear_regression(steps, held).slope

    def words(self) -> str:
        """What the figures say of a suspected leak, in one clause."""
        slope = self.slope_bytes
        if slope is None:
            return "too few steps were made to say whether this run's own memory grows"
        (first, bytes_first), (last, bytes_last) = self.points[0], self.points[-1]
        if slope * (last - first) < _NEGLIGIBLE * bytes_first:
            return (
                f"what this run holds between steps has not grown since step {first} ({human_bytes(bytes_last)}): "
                "another process takes the memory, or it is fragmented"
            )
        worst = max(self.grown_bytes, key=lambda entry: entry[1])[0]
        return (
            f"what this run holds between steps grows by {human_bytes(int(slope))} per step, most of it "
            f"{_IN_WORDS[worst]}: {human_bytes(bytes_first)} at step {first}, {human_bytes(bytes_last)} at step {last}"
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`, after a way through JSON."""
        last = fields["last"]
        return cls(
            points=_pairs(fields["points"]),
            grown_bytes=_pairs(fields["grown_bytes"]),
            last=None if last is None else (last[0], last[1]),
            attempts=fields["attempts"],
        )


def _pairs(given: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(tuple(pair) for pair in given)
