"""What a rank says of its own progress, and what follows from what the ranks have said.

Nothing here waits, starts a thread or touches the store: that is `liveness`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a main thread said it is.

    Attributes:
        beats: beats so far; entering and leaving a wait are beats.
        where: phase, step and micro-step.
        waiting: the peers' part that it waits for; None if it does not wait.
    """

    beats: int = 0
    where: str = "start"
    waiting: str | None = None


class Pulse:
    """What the main thread says of itself; a beat costs no more than an assignment, with no lock and no I/O."""

    def __init__(self) -> None:
        self._at: tuple[int, str, int, int | None, str | None] = (0, "start", 0, None, None)

    def beat(self, phase: str, step: int, micro_step: int | None = None) -> None:
        """Say that the main thread moves, and where it is."""
        at = self._at
        self._at = (at[0] + 1, phase, step, micro_step, at[4])

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark that the main thread waits for its peers: in a vote, or where any call may be a collective.

        Who waits is not the hung rank. If all ranks wait and none moves, all are reported.
        """
        outer = self._at[4]
        self._wait_for(what)
        try:
            yield
        finally:
            self._wait_for(outer)

    def _wait_for(self, what: str | None) -> None:
        beats, phase, step, micro_step, _ = self._at
        self._at = (beats + 1, phase, step, micro_step, what)

    def place(self) -> Place:
        """Where the main thread is, as it said last; for other threads."""
        # One read: the parts belong together, and the main thread may beat between two reads.
        beats, phase, step, micro_step, waiting = self._at
        where = f"{phase}, step {step}" if micro_step is None else f"{phase}, step {step}, micro-step {micro_step}"
        return Place(beats=beats, where=where, waiting=waiting)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank publishes.

    Attributes:
        number: heartbeats so far: who publishes nothing, stops here.
        progress: looks at which the main thread had moved since the look before.
        where: phase, step and micro-step.
        waiting: what it waits for; None if it does not wait.
        host: name of its host.
        pid: its process.
        started: start of the process, seconds since the epoch, as psutil says.
        left: the rank is done; nothing more will come.
    """

    number: int
    progress: int
    where: str
    waiting: str | None
    host: str
    pid: int
    started: float
    left: bool = False


@dataclass(frozen=True, kw_only=True)
class Hung:
    """What all ranks are told of a hang.

    Attributes:
        ranks: ranks that show no progress and wait for nobody; all ranks, if every one of them waits.
        not_answering: those of them that publish nothing: stopped, gone, cut off, or held up outside Python.
        where: phase, step and micro-step of each of `ranks`, as last published.
        for_s: how long the longest of them has shown no progress, in seconds.
        stacks: folder with ``rank{r}.txt``: the Python stacks of each rank that could write them; of one that could
            not, what its operating system says of it, if a rank on the same host could look.
    """

    ranks: tuple[int, ...]
    not_answering: tuple[int, ...]
    where: tuple[str, ...]
    for_s: float
    stacks: Path

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that hold up the others; empty if that can't be told, as in a collective that never ends."""
        if self.not_answering:
            return self.not_answering
        return self.ranks if len(self.ranks) == 1 else ()

    @property
    def message(self) -> str:
        """One line for people."""
        places: dict[str, list[int]] = {}
        for rank, where in zip(self.ranks, self.where, strict=True):
            if rank in (self.culprits or self.ranks):
                places.setdefault(where, []).append(rank)
        named = "; ".join(f"{_named(ranks)} ({where})" for where, ranks in places.items())
        what = "nothing heard" if self.not_answering else "no progress"
        unknown = "" if self.culprits else "; which of them is the cause is not known"
        return f"{what} for {self.for_s:.0f} s of {named}{unknown}; stacks in {self.stacks}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass
class Sighting:
    """What one rank has seen of another.

    Attributes:
        heartbeat: the last one; None before the first.
        silent_s: seconds since it was new, while the store answered.
        still_s: seconds since it showed progress, while the store answered.
    """

    heartbeat: Heartbeat | None = None
    silent_s: float = 0.0
    still_s: float = 0.0

    def look(self, heartbeat: Heartbeat | None, passed_s: float) -> None:
        """Take in what the store holds `passed_s` seconds after the last look."""
        before, self.heartbeat = self.heartbeat, heartbeat
        new = heartbeat is not None and (before is None or heartbeat.number != before.number)
        moved = heartbeat is not None and (before is None or heartbeat.progress != before.progress)
        self.silent_s = 0.0 if new else self.silent_s + passed_s
        self.still_s = 0.0 if moved else self.still_s + passed_s

    @property
    def waits(self) -> bool:
        """It said that it waits for its peers."""
        return self.heartbeat is not None and self.heartbeat.waiting is not None

    @property
    def left(self) -> bool:
        """It is done."""
        return self.heartbeat is not None and self.heartbeat.left


def find_hung(seen: Sequence[Sighting], hang_timeout_s: float, stacks: Path) -> Hung | None:
    """The hung ranks among `seen`, of which there is one sighting per rank; None if there are none.

    Once one rank is over the time-out, those over half of it count too: who ran into the same collective a little
    later must not look healthy.
    """
    here = [rank for rank, one in enumerate(seen) if not one.left]

    def silent(over_s: float) -> list[int]:
        return [rank for rank in here if seen[rank].silent_s >= over_s]

    def still(over_s: float) -> list[int]:
        return [rank for rank in here if seen[rank].still_s >= over_s and not seen[rank].waits]

    not_answering: list[int] = []
    if silent(hang_timeout_s) or still(hang_timeout_s):
        not_answering = silent(hang_timeout_s / 2)
        ranks = sorted({*not_answering, *still(hang_timeout_s / 2)})
    elif here and all(seen[rank].still_s >= hang_timeout_s for rank in here):
        ranks = here
    else:
        return None
    return Hung(
        ranks=tuple(ranks),
        not_answering=tuple(not_answering),
        where=tuple(place_of(seen[rank]) for rank in ranks),
        for_s=max(seen[rank].still_s for rank in ranks),
        stacks=stacks,
    )


def place_of(one: Sighting) -> str:
    """Where a rank was when it was heard last."""
    if one.heartbeat is None:
        return "the start, before its first heartbeat"
    waiting = "" if one.heartbeat.waiting is None else f", waiting for {one.heartbeat.waiting}"
    return one.heartbeat.where + waiting
