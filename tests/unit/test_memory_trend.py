"""Where memory grows, as the ranks' own figures tell it."""

from __future__ import annotations

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from allranks.coordinator.attempt import AttemptPhase
from allranks.coordinator.memory_trend import MemoryTrend
from allranks.units import GIB, MIB

PHASES: list[AttemptPhase] = ["step", "eval", "save"]


def leaking(phase: AttemptPhase, steps: int, leak_bytes: int) -> MemoryTrend:
    """A run that evaluates after each step, and in which attempts of one phase keep `leak_bytes`."""
    trend, held = MemoryTrend(), 10 * GIB
    for step in range(steps):
        for now in ("step", "eval"):
            trend = trend.began(now, step, held)  # type: ignore[arg-type]
            held += leak_bytes if now == phase else 0
    return trend


def test_slope_and_phase_of_a_leak_are_told() -> None:
    for phase, words in (("step", "in training steps"), ("eval", "in evaluations")):
        trend = leaking(phase, 300, 20 * MIB)  # type: ignore[arg-type]
        assert trend.slope_bytes is not None
        assert abs(trend.slope_bytes - 20 * MIB) < 1
        assert f"grows by 20 MiB per step, most of it {words}: " in trend.words()


def test_memory_that_stays_is_not_this_runs_leak() -> None:
    assert "has not grown since step 2 (10 GiB): another process takes the memory" in leaking("save", 50, 1).words()


def test_what_the_first_steps_allocate_is_no_leak() -> None:
    trend = MemoryTrend()
    for step in range(40):
        trend = trend.began("step", step, 10 * GIB if step < 2 else 14 * GIB)
    assert "has not grown" in trend.words()


def test_too_few_steps_say_nothing() -> None:
    assert "too few steps" in leaking("step", 5, GIB).words()
    assert "too few steps" in MemoryTrend().began("step", 1, None).words()


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 3), st.none() | st.integers(0, 2**45)), max_size=300))
def test_a_trend_is_bounded_and_survives_json(seen: list[tuple[AttemptPhase, int, int | None]]) -> None:
    trend, step = MemoryTrend(), 0
    for phase, ahead, held in seen:
        step += ahead
        trend = trend.began(phase, step, held)
        assert len(trend.points) <= 64
        assert trend.words()
    assert MemoryTrend.from_dict(json.loads(json.dumps(asdict(trend)))) == trend
