"""The data state of contract B2."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allranks.train.job import Position


@given(samples=st.integers(1, 50), batch=st.integers(1, 20), steps=st.integers(0, 60))
def test_epochs_follow_each_other_without_a_gap(samples: int, batch: int, steps: int) -> None:
    position, taken = Position(), 0
    for _ in range(steps):
        count = min(batch, samples - position.consumed)
        position = position.after(count, epoch_samples=samples)
        taken += count
    assert position.step == steps
    assert position.epoch * samples + position.consumed == taken
    assert 0 <= position.consumed < samples
