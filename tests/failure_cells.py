"""The cells of the failure matrix: which there are, what shall become of each, and which share a run. Pure.

A cell is one fault: under this profile, at this place, on these ranks, of this kind. Each place has a step of its own,
so that a run can hold a cell for each place, and what became of each is told apart by its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from allranks.plan.plan import FaultKind, Phase, ProfileKind

Who = Literal["rank 0", "last rank", "two at once"]
Tier = Literal["in place", "restart", "stop"]
Pair = frozenset[tuple[str, str]]

STEPS = 11
SAVED_EVERY = 2
EVALUATED_AT = 7
BATCH = 8
"""Samples of a micro-batch before anything has failed: they can be halved three times."""

PLACES: dict[str, tuple[Phase, int]] = {
    "load": ("load", 1),
    "first forward": ("forward", 1),
    "forward": ("forward", 3),
    "backward": ("backward", 4),
    "reduce": ("reduce", 5),
    "step": ("step", 6),
    "eval": ("eval", EVALUATED_AT),
    "save": ("save", 8),
    "vote": ("vote", 10),
    "final": ("final", STEPS),
}
"""Phase and step of each place, in the order in which a run comes by."""

KINDS: tuple[FaultKind, ...] = ("oom", "alloc", "exit", "sigkill", "sigstop")
_MEMORY = ("oom", "alloc")
_MICRO_BATCHES = ("first forward", "forward", "backward")
_LOCKSTEP = ("zero3", "fsdp")
_MEMORY_FAILURES_OF_A_RUN = 3
"""As many halvings are there, and one more without any growth in work would be called a leak."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault of the matrix.

    Attributes:
        profile: of the run.
        place: one of `PLACES`.
        who: which ranks fail.
        kind: of the fault.
    """

    profile: ProfileKind
    place: str
    who: Who
    kind: FaultKind

    @property
    def name(self) -> str:
        return "-".join((self.profile, self.place, self.who, self.kind)).replace(" ", "_")

    @property
    def ranks(self) -> int:
        """Ranks of the run. Where two fail at once a third is left, for if all are stopped nobody can tell."""
        return 1 if self.profile == "single" else 3 if self.who == "two at once" else 2

    @property
    def failing(self) -> tuple[int, ...]:
        return {"rank 0": (0,), "last rank": (self.ranks - 1,), "two at once": (0, self.ranks - 1)}[self.who]

    @property
    def phase(self) -> Phase:
        return PLACES[self.place][0]

    @property
    def step(self) -> int:
        """Step at which it is injected; 1 for `load`, which does not compare it."""
        return PLACES[self.place][1]

    @property
    def faults(self) -> tuple[str, ...]:
        """For `--inject`."""
        return tuple(f"rank={rank},step={self.step},phase={self.phase},kind={self.kind}" for rank in self.failing)

    @property
    def memory(self) -> bool:
        return self.kind in _MEMORY

    @property
    def tier(self) -> Tier:
        """What docs/coordinator.md says of it."""
        if not self.memory:
            return "restart"
        if self.place == "load":
            return "stop"
        if self.place in (*_MICRO_BATCHES, "eval"):
            return "restart" if self.profile in _LOCKSTEP else "in place"
        if self.place in ("save", "final"):
            return "in place" if self.profile in ("single", "ddp") else "restart"
        return "restart"

    @property
    def shrinks(self) -> int:
        """How often, at most, it makes the caps of training smaller."""
        return len(self.failing) if self.memory and self.place in _MICRO_BATCHES else 0

    @property
    def resumed_steps(self) -> tuple[int, ...]:
        """The checkpoints from which all ranks may go on when they start again.

        The last one is written while training goes on, so it counts only if the fault came late enough. At the next
        save and at the end the ranks have waited for it.
        """
        if self.place in ("load", "first forward"):
            return (0,)
        if self.phase == "final":
            return (STEPS,)
        committed = self.step if self.phase == "eval" else self.step - 1
        last = committed // SAVED_EVERY * SAVED_EVERY
        return (last,) if self.phase == "save" else (last, last - SAVED_EVERY)

    @property
    def pairs(self) -> frozenset[Pair]:
        """Every two of its four values."""
        values = (("profile", self.profile), ("place", self.place), ("who", self.who), ("kind", self.kind))
        return frozenset(map(frozenset, itertools.combinations(values, 2)))


def all_cells() -> tuple[Cell, ...]:
    """The whole matrix. Under `single` there is one rank that can fail, and nobody to notice that it is stopped."""
    whos: tuple[Who, ...] = get_args(Who)
    return tuple(
        Cell(profile=profile, place=place, who=who, kind=kind)
        for profile in get_args(ProfileKind)
        for place in PLACES
        for who in (whos if profile != "single" else whos[:1])
        for kind in KINDS
        if (profile, kind) != ("single", "sigstop")
    )


def pairwise(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """A few of `cells` in which every pair of values occurs that occurs in any of them; greedily, the cheap ones."""
    missing = frozenset[Pair]().union(*(cell.pairs for cell in cells))
    chosen: list[Cell] = []
    while missing:
        chosen.append(max(cells, key=lambda cell: (len(cell.pairs & missing), -_cost(cell))))
        missing -= chosen[-1].pairs
    return tuple(chosen)


def _cost(cell: Cell) -> int:
    """Processes that have to be started for it."""
    return cell.ranks * {"in place": 0, "restart": 1, "stop": 2}[cell.tier]


def runs_of(cells: Sequence[Cell]) -> tuple[tuple[Cell, ...], ...]:
    """Put the cells into as few runs as they need, each in the order in which its faults happen.

    A run has one profile and one number of ranks, one cell for each place, and no more memory failures than the policy
    takes. A cell that stops the run has it alone.
    """
    runs: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda cell: list(PLACES).index(cell.place)):
        room = next((run for run in runs if _fits(cell, run)), None)
        if room is None:
            runs.append([cell])
        else:
            room.append(cell)
    return tuple(map(tuple, runs))


def _fits(cell: Cell, run: Sequence[Cell]) -> bool:
    return (
        (cell.profile, cell.ranks) == (run[0].profile, run[0].ranks)
        and "stop" not in (cell.tier, run[0].tier)
        and cell.place not in {other.place for other in run}
        and sum(other.shrinks for other in (cell, *run)) <= _MEMORY_FAILURES_OF_A_RUN
    )
