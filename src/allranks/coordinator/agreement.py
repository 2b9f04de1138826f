"""The control plane, and the two votes of an attempt on it.

A vote is one small all-gather: every rank gives a row of numbers and gets the rows of all, so all ranks see the same
table and draw the same verdict from it (`ballots`). No GPU is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks.coordinator.ballots import Ballot, StepBallot, StepTally, Tally, VotesDisagree, tally_one, tally_two
from allranks.errors import AllranksError, ExitCode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROW_WIDTH = 24
"""Numbers that one rank can give in one exchange; fixed, because gloo does not check that sizes agree."""
_HEADER_WIDTH = 3


class ControlPlaneLost(AllranksError):
    """The ranks can't agree any more: a rank died or the network failed. Never retried on the same group."""

    exit_code = ExitCode.RANK_LOST


class ControlPlane:
    """A gloo group of its own over all ranks; with one rank, nothing at all.

    Its time-out is hours, because a slow rank is no lost rank: a peer that died closes its connections
    and is noticed in under a second, whatever the time-out.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta = timedelta(hours=6),
        join_timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Make the group. All ranks call this at the same place, after the default group was made.

        Args:
            rank: this one.
            world_size: ranks.
            timeout: how long a vote may wait.
            join_timeout: how long to wait for the others here.

        Raises:
            RuntimeError: another rank did not come.
        """
        self.rank = rank
        self.world_size = world_size
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _what: nullcontext()
        """Entered around each wait for the other ranks, with what is waited for."""
        self._exchanges = 0
        self._lost: str | None = None
        self._group: ProcessGroup | None = None
        if world_size > 1:
            import torch
            from torch.distributed import distributed_c10d, new_group

            self._group = new_group(backend="gloo", timeout=join_timeout)
            distributed_c10d._set_pg_timeout(timeout, self._group)
            self._mine = torch.zeros(_HEADER_WIDTH + ROW_WIDTH, dtype=torch.float64, device="cpu")
            self._table = torch.zeros(world_size, _HEADER_WIDTH + ROW_WIDTH, dtype=torch.float64, device="cpu")
            self._rows = list(self._table.unbind())

    def exchange(self, row: Sequence[float], *, topic: int = 0) -> list[list[float]]:
        """Give this rank's row and get the rows of all ranks, in the order of ranks.

        Whole numbers are exact up to 2**53; a NaN or infinity stays in its own row.

        Args:
            row: at most `ROW_WIDTH` numbers, as many on every rank.
            topic: what is being exchanged; ranks with different topics at the same exchange have parted.

        Raises:
            ControlPlaneLost: a rank is gone. The group is not used again.
            VotesDisagree: the ranks are at different exchanges.
        """
        if len(row) > ROW_WIDTH:
            raise ValueError(f"{len(row)} numbers in a row of {ROW_WIDTH}")
        header = (float(self._exchanges), float(topic), float(len(row)))
        self._exchanges += 1
        rows = self._gather([*header, *map(float, row)])
        headers = [tuple(other[:_HEADER_WIDTH]) for other in rows]
        if len(set(headers)) > 1:
            raise VotesDisagree(f"(exchange, topic, width) by rank is {headers}")
        return [other[_HEADER_WIDTH : _HEADER_WIDTH + len(row)] for other in rows]

    def _gather(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, [world_size, header + ROW_WIDTH], by one all-gather: half the way of an all-reduce."""
        if self._lost is not None:
            raise ControlPlaneLost(self._lost)
        if self._group is None:
            return [row]
        self._mine.numpy()[: len(row)] = row  # what is left of longer rows behind it nobody reads
        # A wait cut short by any exception leaves the group's messages out of step for good.
        self._lost = "the control plane was interrupted in an exchange and can't be used again"
        try:
            with self.waiting("a vote"):
                # Without the checks of `torch.distributed.all_gather`, which cost a sixth of a vote.
                self._group.allgather([self._rows], [self._mine]).wait()
        except RuntimeError as exc:
            self._lost = f"rank {self.rank} lost its peers: {_gloo_words(exc)}"
            raise ControlPlaneLost(self._lost) from exc
        self._lost = None
        table: list[list[float]] = self._table.tolist()
        return table

    def broadcast_text(self, text: str | None) -> str:
        """Give rank 0's text to all ranks; for start-up, not for steps.

        Raises:
            ControlPlaneLost: a rank is gone. The group is not used again.
        """
        if self._lost is not None:
            raise ControlPlaneLost(self._lost)
        if self._group is None:
            assert text is not None
            return text
        from torch.distributed import broadcast_object_list

        box = [text]
        self._lost = "the control plane was interrupted in a broadcast and can't be used again"
        try:
            with self.waiting("rank 0"):
                broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as exc:
            self._lost = f"rank {self.rank} lost its peers: {_gloo_words(exc)}"
            raise ControlPlaneLost(self._lost) from exc
        self._lost = None
        assert box[0] is not None
        return box[0]

    def close(self) -> None:
        """Give the group back; every later exchange raises. A lost group is left alone: it may never answer."""
        if self._group is not None and self._lost is None:
            from torch.distributed import destroy_process_group

            destroy_process_group(self._group)
        self._lost = self._lost or "the control plane was closed"


def _gloo_words(error: RuntimeError) -> str:
    """The part of gloo's text that says something: without its source line and its general advice."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(" This is typically")[0]


def vote_one(control: ControlPlane, ballot: Ballot) -> Tally:
    """Vote 1: did all ranks finish their parts? Before any gradient travels.

    Raises:
        ControlPlaneLost: a rank is gone.
        VotesDisagree: the ranks have parted.
    """
    return tally_one([Ballot.from_row(row) for row in control.exchange(ballot.to_row(), topic=1)])


def vote_two(control: ControlPlane, ballot: StepBallot) -> StepTally:
    """Vote 2: may all ranks make the optimizer step?

    Raises:
        ControlPlaneLost: a rank is gone.
        VotesDisagree: the ranks have parted, or a sample was lost or counted twice.
    """
    return tally_two([StepBallot.from_row(row) for row in control.exchange(ballot.to_row(), topic=2)])
