"""Padded micro-batches: neighbours in length, so that little is padded."""

from __future__ import annotations

import heapq
from operator import mul

from allranks.batches.deal import Batch, Piece, Ranks, deal_lightest, deal_rows

_Span = tuple[int, int]
"""First item of a micro-batch and the one after its last."""


def fewest_padded_slots(batch: Batch) -> int:
    """Micro-steps of each rank that hold all items under the caps."""
    n = len(batch.tokens)
    return -(-_count(batch.costs, _rooms(batch), 0, float("inf"), n) // batch.world)


def padded_ranks(batch: Batch, slots: int, lockstep: bool) -> Ranks:
    """Spans of neighbours, nearly equal in cost, dealt to ranks as at most `slots` micro-batches each."""
    n, world = len(batch.tokens), batch.world
    spans = _equal_spans(batch.costs, _rooms(batch), slots * world, world)
    spans = _halved(batch.costs, spans, min(slots * world if lockstep else world, n))
    pieces = [Piece(cost=(stop - start) * batch.costs[start], items=tuple(range(start, stop))) for start, stop in spans]
    return deal_rows(pieces, world) if lockstep else deal_lightest(pieces, world, slots)


def _rooms(batch: Batch) -> list[int]:
    """For each item, how many a micro-batch may hold of which it is the longest."""
    if batch.max_tokens is None:
        return [batch.max_samples] * len(batch.tokens)
    return [max(1, min(batch.max_samples, batch.max_tokens // tokens)) for tokens in batch.tokens]


def _size(costs: list[float], rooms: list[int], item: int, bound: float) -> int:
    """Items of the largest micro-batch that begins at `item` and costs at most `bound`, but at least 1."""
    room = rooms[item]
    return room if costs[item] * room <= bound else max(1, int(bound / costs[item]))


def _count(costs: list[float], rooms: list[int], start: int, bound: float, limit: int) -> int:
    """Fewest micro-batches of at most `bound` cost that hold the items from `start` on; gives up above `limit`.

    Filling greedily from the longest is optimal: a micro-batch that begins later never holds less.
    """
    count, item, n = 0, start, len(costs)
    while item < n and count <= limit:
        item += _size(costs, rooms, item, bound)
        count += 1
    return count


def _equal_spans(costs: list[float], rooms: list[int], limit: int, world: int) -> list[_Span]:
    """At most `limit` spans, the costliest as cheap as possible.

    A sample so long that it alone sets the bound lets the other ranks of its slot fill up to it; then the bound is
    sought anew for the rest.
    """
    spans: list[_Span] = []
    item, n, bound, sought_at = 0, len(costs), float("inf"), float("inf")
    while item < n:
        paced = bound <= sought_at
        if paced or costs[item] <= sought_at / 2:
            bound, sought_at = _least_bound(costs, rooms, item, limit - len(spans), bound), costs[item]
        for _ in range(world):
            if item < n:
                stop = min(n, item + _size(costs, rooms, item, bound))
                spans.append((item, stop))
                item = stop
    return spans


def _least_bound(costs: list[float], rooms: list[int], start: int, limit: int, feasible: float) -> float:
    """Smallest cost under which the items from `start` on fit into `limit` micro-batches, to 1 %.

    Args:
        feasible: a bound known to suffice.
    """
    low = costs[start]
    if _count(costs, rooms, start, low, limit) <= limit:
        return low
    high: float = min(feasible, max(map(mul, costs[start:], rooms[start:])))
    while high - low > 1e-2 * low:
        middle = (low + high) / 2
        if _count(costs, rooms, start, middle, limit) <= limit:
            high = middle
        else:
            low = middle
    return high


def _halved(costs: list[float], spans: list[_Span], wanted: int) -> list[_Span]:
    """Halve the costliest span of several items until there are `wanted`: no rank idles while another has two."""
    whole = [span for span in spans if span[1] - span[0] == 1]
    heap = [(-(stop - start) * costs[start], start, stop) for start, stop in spans if stop - start > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(whole) < wanted:
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            if half[1] - half[0] > 1:
                heapq.heappush(heap, (-(half[1] - half[0]) * costs[half[0]], *half))
            else:
                whole.append(half)
    return sorted(whole + [(start, stop) for _, start, stop in heap])
