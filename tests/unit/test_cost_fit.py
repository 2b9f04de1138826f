"""The cost of a micro-batch, fitted to what micro-batches took."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.batches.fit import CostFit, Work, work_of
from allranks.batches.split import Cost, split
from allranks.caps import Caps

PRIOR = Cost(a=1.0, b=1.0 / (6 * 4096), c=4096.0)
TRUE = Cost(a=40e-6, b=3e-9, c=0.05)
"""Seconds; another shape than the prior: a micro-batch is three times cheaper, a pair of tokens twice as dear."""


def _steps(count: int, *, seed: int = 0, noise: float = 0.0, padded: bool = True) -> list[list[tuple[Work, float]]]:
    """Micro-batches of real splits of long samples of all lengths, and what they take under `TRUE`."""
    random = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        lengths = np.clip(random.lognormal(6.91, 0.81, 128), 8, 8192).astype(int).tolist()
        ranks = split(lengths, world_size=2, caps=Caps(max_samples=64, max_tokens=16384), lockstep=False, padded=padded)
        works = [work_of([lengths[i] for i in micro], padded=padded) for rank in ranks for micro in rank]
        steps.append([(work, work.cost(TRUE) * (1 + noise * random.standard_normal())) for work in works])
    return steps


def _fitted(steps: list[list[tuple[Work, float]]], prior: Cost = PRIOR) -> CostFit:
    fit = CostFit(prior=prior)
    for step in steps:
        fit = fit.observed(step)
    return fit


def test_the_work_of_padded_and_of_flat_micro_batches() -> None:
    assert work_of([3, 1], padded=True) == Work(tokens=6, pairs=18)
    assert work_of([3, 1], padded=False) == Work(tokens=4, pairs=10)
    assert work_of([], padded=True) == work_of([], padded=False) == Work(tokens=0, pairs=0)
    assert Work(tokens=4, pairs=10).cost(Cost(a=2.0, b=0.5, c=3.0)) == 16.0


def test_the_cost_of_varied_micro_batches_is_found() -> None:
    fit = _fitted(_steps(400, noise=0.02))
    cost = fit.cost()
    assert cost.a == pytest.approx(TRUE.a, rel=0.05)
    assert cost.b == pytest.approx(TRUE.b, rel=0.10)
    assert cost.c == pytest.approx(TRUE.c, rel=0.35)  # the prior, three times as high, weighs as one observation
    assert fit.error == pytest.approx(0.02, abs=0.005)


def test_what_is_alike_keeps_the_shape_that_was_assumed() -> None:
    work = work_of([512] * 20, padded=False)
    cost = _fitted([[(work, 1.5)]] * 50).cost()
    assert cost.b / cost.a == pytest.approx(PRIOR.b / PRIOR.a, rel=1e-6)
    assert cost.c / cost.a == pytest.approx(PRIOR.c / PRIOR.a, rel=1e-6)
    assert work.cost(cost) == pytest.approx(1.5)


def test_no_part_of_a_cost_is_negative() -> None:
    """The longer, the less a token takes: least squares alone would pay for pairs."""
    steps = [[(work_of([n], padded=False), 1e-3 * math.sqrt(n)) for n in (10, 100, 1000, 8000)]] * 20
    cost = _fitted(steps).cost()
    assert cost.b == 0.0
    assert min(cost.a, cost.c) > 0


def test_tokens_and_micro_batches_never_cost_nothing() -> None:
    alike = [[(work_of([n], padded=False), 0.05) for n in (10, 100, 1000, 8000)]] * 20
    assert _fitted(alike).cost().a > 0
    for_nothing = [[(work_of([n], padded=False), 1e-9 * n * n) for n in (10, 100, 1000, 8000)]] * 20
    assert _fitted(for_nothing).cost().c > 0


def test_a_stall_does_not_count() -> None:
    calm = _steps(30)
    stalled = [[*step[:-1], (step[-1][0], 40.0)] if number == 20 else step for number, step in enumerate(calm)]
    assert _fitted(stalled).cost().c == pytest.approx(_fitted(calm).cost().c, rel=0.02)


def test_new_steps_outweigh_old_ones() -> None:
    """Gradient checkpointing, turned on by the ranks, makes everything a third dearer."""
    before, after = _steps(100), _steps(200, seed=1)
    dearer = [[(work, 4 / 3 * seconds) for work, seconds in step] for step in after]
    work = Work(tokens=10_000, pairs=10**7)
    assert work.cost(_fitted(before + dearer).cost()) == pytest.approx(4 / 3 * work.cost(TRUE), rel=0.02)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), ranks=st.integers(1, 5))
def test_what_ranks_saw_apart_adds_up(seed: int, ranks: int) -> None:
    steps = _steps(6, seed=seed, noise=0.1)
    apart = [CostFit(prior=PRIOR) for _ in range(ranks)]
    for step in steps:
        apart = [fit.observed(step[rank::ranks]) for rank, fit in enumerate(apart)]
    whole = CostFit.of_all(PRIOR, [fit.to_row() for fit in apart])
    again = CostFit.of_all(PRIOR, [fit.to_row() for fit in apart])
    assert whole == again
    # Each rank knows stalls by its own scale; without any, nothing else differs from one rank that sees all.
    assert whole.cost().a == pytest.approx(_fitted(steps).cost().a, rel=1e-6)


def test_nothing_observed_has_no_cost() -> None:
    with pytest.raises(ValueError, match="nothing was observed"):
        CostFit(prior=PRIOR).cost()
    assert CostFit.of_all(PRIOR, [CostFit(prior=PRIOR).to_row()] * 2).weight == 0


def test_a_fitted_cost_makes_the_slowest_rank_faster() -> None:
    """Where a pair of tokens is dear, samples of 8,000 tokens are spread; the prior sees little in them."""
    dear = Cost(a=40e-6, b=40e-9, c=0.05)
    works = [work for step in _steps(60) for work, _ in step]
    fit = CostFit(prior=PRIOR).observed([(work, work.cost(dear)) for work in works])
    random = np.random.default_rng(9)
    lengths = np.clip(random.lognormal(6.91, 0.81, 64), 8, 8192).astype(int).tolist()

    def slowest(cost: Cost) -> float:
        ranks = split(
            lengths, world_size=4, caps=Caps(max_samples=64, max_tokens=16384), lockstep=False, padded=False, cost=cost
        )
        return max(sum(work_of([lengths[i] for i in m], padded=False).cost(dear) for m in rank) for rank in ranks)

    assert slowest(fit.cost()) < 0.97 * slowest(PRIOR)
    assert slowest(fit.cost()) == pytest.approx(slowest(dear), rel=0.01)
