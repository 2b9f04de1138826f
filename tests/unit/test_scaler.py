"""The fp16 loss scale."""

from __future__ import annotations

import math

from allranks.train.scaler import GROWTH_INTERVAL, INITIAL_SCALE, LossScale


def test_bf16_and_fp32_never_scale_nor_skip() -> None:
    for precision in ("bf16", "no"):
        scale = LossScale(precision)
        assert scale.value == 1.0
        assert not scale.skips(math.inf)
        assert scale.state() is None


def test_overflow_halves_and_skips() -> None:
    scale = LossScale("fp16")
    assert scale.skips(math.inf)
    assert scale.value == INITIAL_SCALE / 2
    assert scale.skips(math.nan)
    assert scale.value == INITIAL_SCALE / 4
    assert not scale.skips(1.0)


def test_good_steps_in_a_row_double() -> None:
    scale = LossScale("fp16")
    for _ in range(GROWTH_INTERVAL - 1):
        assert not scale.skips(1.0)
    assert scale.value == INITIAL_SCALE
    assert not scale.skips(1.0)
    assert scale.value == INITIAL_SCALE * 2


def test_state_goes_through_a_checkpoint() -> None:
    scale, restored = LossScale("fp16"), LossScale("fp16")
    scale.skips(math.inf)
    scale.skips(1.0)
    restored.load(scale.state())
    assert restored.state() == scale.state()
