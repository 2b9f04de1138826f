"""Splitting one global batch into micro-batches over ranks: contract B4, a pure function.

The problem is NP-hard; this is a heuristic for global batches of up to some thousand samples. The tests of
`allranks.batches.split` hold its distance to the lower bound on real mixes and to the true optimum of small cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.batches.deal import Batch, Ranks, slowest
from allranks.batches.flat import fewest_flat_slots, flat_ranks
from allranks.batches.padded import fewest_padded_slots, padded_ranks
from allranks.caps import Caps

MicroBatch = tuple[int, ...]
"""Positions in the global batch; none in a filler."""

Split = tuple[tuple[MicroBatch, ...], ...]
"""The micro-batches of each rank."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time of a micro-batch as c + the sum over its samples of a·tokens + b·tokens², in any one unit.

    With padding, the tokens of each sample are those of the longest.

    Attributes:
        a: of a token, in the layers that are linear in the length.
        b: of a pair of tokens, in attention.
        c: of a micro-batch itself: launching kernels, dequantising the base. The default is in tokens, and
            cautious: a line through two runs of Llama-3-8B in NF4 on an H200 meets the axis at about 10,000.
    """

    a: float = 1.0
    b: float = 0.0
    c: float = 4096.0

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0 or self.a + self.b == 0:
            raise ValueError(f"cost a={self.a}, b={self.b}, c={self.c}: none below 0, and a or b above it")


_TOKENS = Cost()


def split(
    lengths: Sequence[int],
    *,
    world_size: int,
    caps: Caps,
    lockstep: bool,
    cost: Cost = _TOKENS,
    padded: bool = True,
) -> Split:
    """Split a global batch so that the slowest rank is done as early, and the ranks as evenly, as can be.

    Args:
        lengths: tokens of each sample of the global batch, each at least 1.
        world_size: ranks.
        caps: of one micro-batch; a sample above `max_tokens` travels alone.
        lockstep: ranks synchronise at every micro-step (fsdp, zero3): they get equally many micro-batches, an
            empty one (a filler) only where there are more slots than samples, and what counts is the sum over
            slots of the slot's largest cost. Without it (single, ddp, zero2) the largest sum of a rank counts.
        cost: what time is estimated by.
        padded: micro-batches are padded to their longest sample and hold neighbours in length; without it they are
            flat sequences.

    Returns:
        For each rank its micro-batches, the costliest first. Every position occurs once. Depends on nothing but the
        arguments; reordering the lengths does not change the cost.

    Raises:
        ValueError: a length or cap below 1, or no rank.
    """
    if caps.max_samples < 1 or (caps.max_tokens is not None and caps.max_tokens < 1):
        raise ValueError(f"{caps}: a cap is at least 1")
    if world_size < 1 or min(lengths, default=1) < 1:
        raise ValueError(f"cannot split lengths {list(lengths)[:8]} over {world_size} ranks")
    if not lengths:
        return ((),) * world_size
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    tokens = [int(lengths[position]) for position in order]
    batch = Batch(
        tokens=tokens,
        costs=[cost.a * count + cost.b * count * count for count in tokens],
        world=world_size,
        max_samples=caps.max_samples,
        max_tokens=caps.max_tokens,
    )
    ranks = _best_ranks(batch, lockstep, padded, cost.c)
    return tuple([tuple([tuple([order[item] for item in piece.items]) for piece in rank]) for rank in ranks])


def _best_ranks(batch: Batch, lockstep: bool, padded: bool, step_cost: float) -> Ranks:
    """The fewest micro-steps that the caps permit, or more of them while each pays for itself."""
    slots = fewest_padded_slots(batch) if padded else fewest_flat_slots(batch)
    plan = padded_ranks if padded else flat_ranks
    least = max(batch.costs[0], sum(batch.costs) / batch.world)
    best = plan(batch, slots, lockstep)
    best_cost = slowest(best, lockstep, step_cost)
    while slots * batch.world < len(batch.tokens) and (slots + 1) * step_cost + least < best_cost:
        slots += 1
        other = plan(batch, slots, lockstep)
        other_cost = slowest(other, lockstep, step_cost)
        if other_cost >= best_cost:
            break
        best, best_cost = other, other_cost
    return best
