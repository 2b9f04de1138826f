"""The order of samples: a pure function of its arguments, and every epoch a permutation."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.batches.order import SampleOrder


def order_of(
    n: int, gbs: int, *, window: int = 1, seed: int = 0, fingerprint: str = "set", lengths=None
) -> SampleOrder:
    if lengths is None:
        lengths = np.arange(n) % 37 + 1
    return SampleOrder(
        n_samples=n, lengths=lengths, seed=seed, fingerprint=fingerprint, global_batch_size=gbs, window=window
    )


def epoch_of(order: SampleOrder, epoch: int = 0) -> list[tuple[int, ...]]:
    batches, consumed = [], 0
    while consumed < order.n_samples:
        batches.append(order.batch(epoch, consumed))
        consumed += len(batches[-1])
    return batches


@given(n=st.integers(1, 300), gbs=st.integers(1, 40), window=st.integers(1, 6), epoch=st.integers(0, 3))
def test_every_epoch_takes_each_sample_once(n, gbs, window, epoch):
    order = order_of(n, gbs, window=window)
    batches = epoch_of(order, epoch)
    assert sorted(sample for batch in batches for sample in batch) == list(range(n))
    assert len(batches) == order.steps_per_epoch
    assert all(len(batch) == gbs for batch in batches[:-1])
    assert len(batches[-1]) == (n % gbs or gbs)


@given(n=st.integers(2, 200), gbs=st.integers(1, 20), window=st.integers(1, 4))
def test_the_next_batch_depends_on_the_position_alone(n, gbs, window):
    whole = epoch_of(order_of(n, gbs, window=window), 2)
    resumed = order_of(n, gbs, window=window)
    resumed.batch(0, 0)
    for step in range(len(whole) - 1, -1, -1):
        assert resumed.batch(2, step * gbs) == whole[step]


def test_the_order_is_pinned():
    """A change here breaks the resume of every run that began before it: raise the version in order.py."""
    assert order_of(12, 4).batch(0, 0) == (1, 5, 9, 0)
    assert order_of(12, 2, window=3).batch(1, 4) == (8, 9)


def test_the_order_changes_with_each_argument():
    base = epoch_of(order_of(100, 10))
    assert epoch_of(order_of(100, 10), 1) != base
    assert epoch_of(order_of(100, 10, seed=1)) != base
    assert epoch_of(order_of(100, 10, fingerprint="other")) != base
    assert epoch_of(order_of(100, 10, window=2)) != base


def test_global_batch_size_leaves_the_plain_order_alone():
    tens = [sample for batch in epoch_of(order_of(100, 10)) for sample in batch]
    sevens = [sample for batch in epoch_of(order_of(100, 7)) for sample in batch]
    assert tens == sevens


def test_a_window_groups_by_length_and_shuffles_the_batches():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.02, 1.03, 6400), 8, 2048).astype(np.int64)

    def padding(window: int) -> float:
        batches = epoch_of(order_of(6400, 16, window=window, lengths=lengths))
        padded = sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches)
        return 1 - int(lengths.sum()) / padded

    assert padding(1) > 0.6
    assert padding(8) < 0.45
    longest = [int(lengths[list(batch)].max()) for batch in epoch_of(order_of(6400, 16, window=8, lengths=lengths))]
    window_of_longest = [step % 8 for step, value in enumerate(longest) if value == max(longest[step - step % 8 :][:8])]
    assert len(set(window_of_longest)) > 4, "the longest batch of a window comes at a random place"


def test_the_small_last_batch_is_not_the_longest_samples():
    lengths = np.arange(103) + 1
    last = [epoch_of(order_of(103, 10, window=4, lengths=lengths), epoch)[-1] for epoch in range(30)]
    assert all(len(batch) == 3 for batch in last)
    assert 30 < np.mean([lengths[sample] for batch in last for sample in batch]) < 75


def test_a_million_samples_are_cheap():
    order = order_of(1_000_000, 64, lengths=np.ones(1_000_000, dtype=np.int64))
    begin = time.perf_counter()
    order.batch(0, 0)
    assert time.perf_counter() - begin < 5
    begin = time.perf_counter()
    for step in range(1000):
        order.batch(0, step * 64)
    assert time.perf_counter() - begin < 1, "the epoch's permutation is not made anew for each batch"


@pytest.mark.parametrize("consumed", [-1, 10, 11])
def test_no_batch_follows_the_end_of_an_epoch(consumed):
    with pytest.raises(ValueError, match=f"{consumed} samples consumed of an epoch of 10"):
        order_of(10, 4).batch(0, consumed)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n": 0}, "n_samples is 0"),
        ({"gbs": 0}, "global_batch_size is 0"),
        ({"window": 0}, "window is 0"),
        ({"fingerprint": ""}, "without a fingerprint"),
        ({"lengths": np.ones(3)}, "3 lengths for 10 samples"),
    ],
)
def test_faulty_arguments(change, text):
    with pytest.raises(ValueError, match=text):
        order_of(**{"n": 10, "gbs": 4, **change})
