"""Dealing pieces of a global batch to ranks, whatever the pieces are."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A global batch, longest sample first; samples are called items, by their place in that order.

    Attributes:
        tokens: of each item.
        costs: of each item, falling like the tokens.
        world: ranks.
        max_samples: cap of a micro-batch.
        max_tokens: cap of a micro-batch of more than one item, or None.
    """

    tokens: list[int]
    costs: list[float]
    world: int
    max_samples: int
    max_tokens: int | None


class Piece(NamedTuple):
    """A micro-batch, or a single item, on its way to a rank.

    Attributes:
        cost: of the whole piece, padding included.
        items: its items, none in a filler.
    """

    cost: float
    items: tuple[int, ...]


Ranks = list[list[Piece]]
"""The pieces of each rank, the costliest first."""

FILLER = Piece(cost=0.0, items=())


def deal_rows(pieces: list[Piece], world: int) -> Ranks:
    """Deal rows of like cost, one piece to every rank, the last row filled up with fillers.

    The costliest piece of a row goes to the rank with the least so far: the row's pace is the same, the spread less.
    """
    ranks: Ranks = [[] for _ in range(world)]
    loads = [0.0] * world
    pieces = costliest_first(pieces)
    for start in range(0, len(pieces), world):
        row = pieces[start : start + world]
        free = sorted(range(world), key=loads.__getitem__)
        for rank, piece in zip(free, row + [FILLER] * (world - len(row)), strict=True):
            ranks[rank].append(piece)
            loads[rank] += piece.cost
    return ranks


def deal_lightest(pieces: list[Piece], world: int, limit: int) -> Ranks:
    """Deal the costliest piece first, each to the least loaded rank that has fewer than `limit`; then level.

    Longest processing time first: at most 4/3 of the optimum (Graham 1969), and all ranks have a piece where
    there are enough.
    """
    ranks: Ranks = [[] for _ in range(world)]
    heap = [(0.0, rank) for rank in range(world)]
    for piece in costliest_first(pieces):
        load, rank = heap[0]
        ranks[rank].append(piece)
        if len(ranks[rank]) < limit:
            heapq.heapreplace(heap, (load + piece.cost, rank))
        else:
            heapq.heappop(heap)
    return [costliest_first(rank) for rank in _levelled(ranks, limit)]


def _levelled(ranks: Ranks, limit: int) -> Ranks:
    """Move or swap pieces between the most and the least loaded rank while that narrows the gap."""
    loads = [sum([piece.cost for piece in rank]) for rank in ranks]
    for _ in range(2 * len(ranks)):
        slow, fast = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[slow] - loads[fast]
        if gap <= 1e-3 * loads[slow]:
            break
        miss, i, j = _best_swap(ranks[slow], ranks[fast], gap, move=len(ranks[fast]) < limit)
        if miss >= gap / 2 * (1 - 1e-9):
            break
        given = ranks[slow].pop(i)
        taken = ranks[fast].pop(j) if j >= 0 else FILLER
        ranks[fast].append(given)
        if taken.items:
            ranks[slow].append(taken)
        loads[slow] += taken.cost - given.cost
        loads[fast] += given.cost - taken.cost
    return ranks


def _best_swap(slow: list[Piece], fast: list[Piece], gap: float, *, move: bool) -> tuple[float, int, int]:
    """By how much the best swap misses the middle of `gap`, and its places in `slow` and `fast`; -1: a mere move."""
    order = sorted(range(len(fast)), key=lambda j: fast[j].cost)
    costs = [fast[j].cost for j in order]
    best = (float("inf"), -1, -1)
    for i, given in enumerate(slow):
        wanted = given.cost - gap / 2
        at = bisect_left(costs, wanted)
        for near in (at - 1, at):
            if 0 <= near < len(costs):
                best = min(best, (abs(wanted - costs[near]), i, order[near]))
        if move:
            best = min(best, (abs(wanted), i, -1))
    return best


def slowest(ranks: Ranks, lockstep: bool, step_cost: float) -> float:
    """Cost of the step: of the slowest rank, or, in lockstep, of the slowest micro-batch of each slot, summed."""
    if lockstep:
        slots: Iterable[tuple[Piece, ...]] = zip(*ranks, strict=True)
        return sum(step_cost + max(piece.cost for piece in slot) for slot in slots)
    return max(sum(step_cost + piece.cost for piece in rank) for rank in ranks)


def costliest_first(pieces: list[Piece]) -> list[Piece]:
    """`pieces` by falling cost, equal ones in their order."""
    return sorted(pieces, key=lambda piece: -piece.cost)
