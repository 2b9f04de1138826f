"""Learning rate and number of steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.schema import TrainingConfig
from allranks.train.schedule import learning_rate, total_steps


def test_cosine_is_that_of_transformers() -> None:
    import torch
    from transformers import get_cosine_schedule_with_warmup

    config = TrainingConfig(learning_rate=1.0, warmup_steps=3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, 20)
    for step in range(1, 21):
        if step > 3:  # transformers' first warm-up step has a rate of 0; ours moves from the start
            assert learning_rate(config, step, 20) == pytest.approx(schedule.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        schedule.step()


@given(kind=st.sampled_from(["cosine", "linear", "constant"]), total=st.integers(1, 300), warmup=st.integers(0, 20))
def test_rates_are_positive_peak_once_and_never_exceed_the_peak(kind: str, total: int, warmup: int) -> None:
    config = TrainingConfig(learning_rate=2e-4, warmup_steps=warmup, lr_scheduler_type=kind)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, total) for step in range(1, total + 1)]
    assert all(0 < rate <= 2e-4 * (1 + 1e-12) for rate in rates)
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)


def test_default_warmup_is_three_per_cent() -> None:
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="constant")
    assert [learning_rate(config, step, 100) for step in (1, 2, 3, 4)] == [1 / 3, 2 / 3, 1.0, 1.0]


def test_max_steps_wins_over_epochs_and_smoke_is_three() -> None:
    assert total_steps(TrainingConfig(num_train_epochs=2), 10) == 20
    assert total_steps(TrainingConfig(num_train_epochs=2, max_steps=7), 10) == 7
    assert total_steps(TrainingConfig(max_steps=70), 10) == 70
    assert total_steps(TrainingConfig(), 10, smoke=True) == 3
    assert total_steps(TrainingConfig(max_steps=2), 10, smoke=True) == 2


def test_rate_depends_on_nothing_but_the_step() -> None:
    config = TrainingConfig()
    assert math.isclose(learning_rate(config, 50, 100), learning_rate(config.model_copy(), 50, 100), rel_tol=0)
