"""Flat micro-batches: one sequence without padding, so that any samples may share one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from allranks.batches.deal import Batch, Piece, Ranks, costliest_first, deal_lightest, deal_rows, slowest


def fewest_flat_slots(batch: Batch) -> int:
    """Micro-steps of each rank that hold all items under the caps, as far as best-fit decreasing finds."""
    if batch.max_tokens is not None:
        # No two of the micro-batches that it leaves short of `max_samples` would fit into one.
        at_most = len(batch.tokens) // batch.max_samples + 2 * sum(batch.tokens) // batch.max_tokens + 1
        if at_most <= batch.world:
            return 1
    return -(-len(_best_fit(batch, range(len(batch.tokens)))) // batch.world)


def flat_ranks(batch: Batch, slots: int, lockstep: bool) -> Ranks:
    """Items balanced over ranks by cost and packed into at most `slots` micro-batches of each rank."""
    return _lockstep(batch, slots) if lockstep else _free(batch, slots)


def _free(batch: Batch, slots: int) -> Ranks:
    """Items shared out over ranks, then packed by each; whole micro-batches shared out where that fails."""
    items = [Piece(cost, (item,)) for item, cost in enumerate(batch.costs)]
    ranks: Ranks = []
    for mine in deal_lightest(items, batch.world, slots * batch.max_samples):
        members = sorted([piece.items[0] for piece in mine])
        bins = _fewest_equal_bins(batch, members)
        if len(bins) > slots:
            whole = _equal_bins(batch, range(len(batch.tokens)), slots * batch.world)
            return deal_lightest(_pieces(batch, whole), batch.world, slots)
        ranks.append(costliest_first(_pieces(batch, bins)))
    return ranks


def _lockstep(batch: Batch, slots: int) -> Ranks:
    """The better of equally heavy micro-batches and of slots that a long item paces."""
    items, world = range(len(batch.tokens)), batch.world
    plans = [_equal_bins(batch, items, slots * world), _paced_bins(batch, slots)]
    return min(
        (deal_rows(_pieces(batch, bins), world) for bins in plans if len(bins) <= slots * world),
        key=lambda ranks: slowest(ranks, True, 0.0),
    )


def _paced_bins(batch: Batch, slots: int) -> list[list[int]]:
    """Slot by slot: while the longest item left outweighs an equal share, the other ranks are filled up to it."""
    left: Sequence[int] = range(len(batch.tokens))
    weight = sum(batch.costs)
    bins: list[list[int]] = []
    while slots > 1 and left and batch.costs[left[0]] * slots * batch.world > weight:
        slot, left = _lightest_first(batch, left, batch.world, batch.costs[left[0]])
        weight = sum(batch.costs[item] for item in left)
        bins.extend(slot)
        slots -= 1
    return bins + _equal_bins(batch, left, slots * batch.world)


def _equal_bins(batch: Batch, items: Sequence[int], limit: int) -> list[list[int]]:
    """Items in `limit` micro-batches of nearly equal cost, or, where they do not fit so, packed tightly.

    There are fewer than `limit` only where there are fewer items: no rank idles while another has two samples.
    """
    bins, left = _lightest_first(batch, items, limit, None)
    if not left:
        return bins
    bins = _best_fit(batch, items)
    while len(bins) < min(limit, len(items)):
        shared = max((members for members in bins if len(members) > 1), key=lambda members: batch.costs[members[0]])
        bins.append([shared.pop()])
    return bins


def _fewest_equal_bins(batch: Batch, items: Sequence[int]) -> list[list[int]]:
    """Items in as few micro-batches as are found, of nearly equal cost."""
    least = -(-len(items) // batch.max_samples)
    if batch.max_tokens is not None:
        least = max(least, -(-sum([batch.tokens[item] for item in items]) // batch.max_tokens))
    if least == 1:
        return [list(items)]
    bins, left = _lightest_first(batch, items, least, None)
    return bins if not left else _equal_bins(batch, items, len(_best_fit(batch, items)))


def _lightest_first(
    batch: Batch, items: Sequence[int], limit: int, pace: float | None
) -> tuple[list[list[int]], list[int]]:
    """The longest item first, each into the lightest of `limit` micro-batches if that has room for it.

    Args:
        pace: cost that no micro-batch of several items may exceed; None: no such bound, and the first item
            without room ends the search.

    Returns:
        The micro-batches that have items, and the items left over.
    """
    bins: list[list[int]] = [[] for _ in range(limit)]
    tokens = [0] * limit
    heap = [(0.0, index) for index in range(limit)]
    left: list[int] = []
    for item in items:
        load, index = heap[0] if heap else (0.0, -1)
        cost = load + batch.costs[item]
        within = batch.max_tokens is None or tokens[index] + batch.tokens[item] <= batch.max_tokens
        if not heap or (bins[index] and not (within and (pace is None or cost <= pace))):
            left.append(item)
            if pace is None:
                break
            continue
        bins[index].append(item)
        tokens[index] += batch.tokens[item]
        if len(bins[index]) < batch.max_samples:
            heapq.heapreplace(heap, (cost, index))
        else:
            heapq.heappop(heap)
    return [members for members in bins if members], left


def _best_fit(batch: Batch, items: Sequence[int]) -> list[list[int]]:
    """Best-fit decreasing: each item into the fullest micro-batch that has room (near the fewest)."""
    if batch.max_tokens is None:
        return [list(items[start : start + batch.max_samples]) for start in range(0, len(items), batch.max_samples)]
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens, index) of the micro-batches that may take more, by rising room
    for item in items:
        size = batch.tokens[item]
        at = bisect_left(free, (size, -1))
        if at < len(free):
            room, index = free.pop(at)
            bins[index].append(item)
        else:
            room, index = batch.max_tokens, len(bins)
            bins.append([item])
        if len(bins[index]) < batch.max_samples and room > size:
            insort(free, (room - size, index))
    return bins


def _pieces(batch: Batch, bins: list[list[int]]) -> list[Piece]:
    return [Piece(sum([batch.costs[item] for item in members]), tuple(members)) for members in bins]
