"""Caps that change without a failure: under pressure, and back when there is room."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.caps import Caps
from allranks.config.schema import OomConfig
from allranks.coordinator.adjustment import PRESSED_STEPS, Adjusted, adjusted
from allranks.coordinator.ballots import Ballot, Tally
from allranks.coordinator.failure import Classification
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import Retry, decide
from allranks.coordinator.policy_state import GROW_AFTER_STEPS, PolicyState
from allranks.units import GIB

CEILING = Caps(max_samples=8, max_tokens=None)
START = PolicyState.start(train=CEILING, evaluation=CEILING)
CUT = START.with_side("step", START.train.cut(samples=8, tokens=4000))  # 4 samples, 2000 tokens
OOM = OomConfig()


def vote(step: int, *, headroom: int | None = None, retries: int = 0, work: int = 10 * GIB) -> Tally:
    """Two ranks that have just made step `step + 1`; the second one has `headroom` bytes to spare."""
    mine = Ballot(
        committed_step=step,
        caps_fingerprint=1,
        held_bytes=5 * GIB,
        peak_bytes=5 * GIB + work,
        headroom_bytes=headroom,
        allocator_retries=retries,
    )
    return Tally(ballots=(replace(mine, headroom_bytes=None if headroom is None else 80 * GIB), mine))


def after(
    state: PolicyState, tally: Tally, *, tokens: int = 2000, in_place: bool = True, grow: bool = True
) -> Adjusted:
    return adjusted(state, tally, largest_tokens=tokens, in_place=in_place, grow_back=grow)


def test_caps_grow_back_by_what_the_least_headroom_allows() -> None:
    grown = after(CUT, vote(30, headroom=5 * GIB))
    assert grown.reason == "headroom"
    assert grown.state.train.caps == Caps(max_samples=5, max_tokens=2800)  # 1 + 0.8 · 5 GiB / 10 GiB
    assert "after step 31 every rank had at least 5 GiB of GPU memory to spare" in grown.message
    assert "from here on at most 5 samples and 2800 tokens per micro-batch" in grown.message
    doubled = after(CUT, vote(30, headroom=70 * GIB))
    assert doubled.state.train.caps == Caps(max_samples=8, max_tokens=4000)


@pytest.mark.parametrize(
    ("tally", "options"),
    [
        (vote(30, headroom=3 * GIB), {}),
        (vote(GROW_AFTER_STEPS - 2, headroom=70 * GIB), {}),
        (vote(30, headroom=None), {}),
        (vote(30, headroom=70 * GIB), {"in_place": False}),
        (vote(30, headroom=70 * GIB), {"grow": False}),
    ],
    ids=["too little", "too soon", "not measured", "a failure would cost a restart", "not wanted"],
)
def test_caps_stay(tally: Tally, options: dict[str, bool]) -> None:
    assert after(CUT, tally, **options) == Adjusted(state=CUT)


def test_caps_never_grow_beyond_what_was_configured() -> None:
    assert after(START, vote(500, headroom=70 * GIB)).reason is None
    bounded = PolicyState.start(train=Caps(max_samples=6, max_tokens=3000), evaluation=CEILING)
    bounded = bounded.with_side("step", CUT.train)
    assert after(bounded, vote(500, headroom=70 * GIB)).state.train.caps == bounded.growth.ceiling


def test_a_growth_that_does_not_last_doubles_the_patience() -> None:
    what = Classification(kind=FailureKind.CUDA_OOM, **vars(TRAITS[FailureKind.CUDA_OOM]))
    state, step, waited = CUT, 0, []
    for _ in range(4):
        began = step
        while (now := after(state, vote(step, headroom=70 * GIB))).reason is None:
            step += 1
        waited.append(step + 1 - began)
        fine = replace(vote(step + 1).ballots[0])
        failed = fine.failing(what, samples=8, tokens=4000)
        decision = decide(now.state, Tally(ballots=(fine, failed)), OOM)
        assert isinstance(decision, Retry)
        state, step = decision.state.finished("step", largest_tokens=2000, longest_tokens=500), step + 1
        assert state.train.caps == CUT.train.caps
    assert waited == [GROW_AFTER_STEPS * 2**n for n in range(4)]


def test_repeated_allocator_retries_shrink_before_anything_fails() -> None:
    state = START
    for step in range(PRESSED_STEPS - 1):
        now = after(state, vote(step, retries=1), tokens=4000)
        assert now.reason is None
        state = now.state
    now = after(state, vote(9, retries=2), tokens=4000)
    assert now.reason == "pressure"
    assert now.state.train.caps == Caps(max_samples=6, max_tokens=3000)
    assert now.state.pressed_at == ()
    assert "its allocator had to free its cache in 3 of the last 20 steps" in now.message


def test_rare_allocator_retries_are_left_alone() -> None:
    state = START
    for step in range(0, 200, 10):
        now = after(state, vote(step, retries=1))
        assert now.reason is None
        state = now.state


@settings(max_examples=200)
@given(
    room=st.integers(1, 64),
    ceiling=st.integers(1, 64),
    tokens_cap=st.none() | st.integers(1, 10_000),
    length=st.integers(1, 2000),
    noise=st.lists(st.sampled_from(["fine", "retries", "other takes half"]), min_size=50, max_size=400),
    in_place=st.booleans(),
)
def test_on_any_gpu_the_caps_stay_in_bounds_and_changes_are_few(
    room: int, ceiling: int, tokens_cap: int | None, length: int, noise: list[str], in_place: bool
) -> None:
    """A GPU with room for `room` samples of `length` tokens, of which another process takes half at times."""
    caps = Caps(max_samples=ceiling, max_tokens=tokens_cap)
    state = PolicyState.start(train=caps, evaluation=caps)
    what = Classification(kind=FailureKind.CUDA_OOM, **vars(TRAITS[FailureKind.CUDA_OOM]))
    grown, retried = [], 0
    for step, event in enumerate(noise):
        room_now = max(1, room // 2) if event == "other takes half" else room
        while True:
            now = state.train.caps
            assert 1 <= now.max_samples <= ceiling
            assert now.max_tokens is None or now.max_tokens >= 1
            assert tokens_cap is None or (now.max_tokens is not None and now.max_tokens <= tokens_cap)
            by_tokens = now.max_samples if now.max_tokens is None else max(1, now.max_tokens // length)
            held = min(now.max_samples, by_tokens)
            tally = vote(
                step,
                headroom=max(0, room_now - held) * GIB,
                retries=int(event == "retries"),
                work=held * GIB,
            )
            if held <= room_now:
                break
            failed = tally.ballots[1].failing(what, samples=held, tokens=held * length)
            decision = decide(state, Tally(ballots=(tally.ballots[0], failed)), OOM)
            if not isinstance(decision, Retry):
                assert "memory is leaking or another process takes it" in decision.message  # type: ignore[union-attr]
                return
            state, retried = decision.state, retried + 1
            assert state.retries <= OOM.max_retries_per_step
        state = state.finished("step", largest_tokens=held * length, longest_tokens=length)
        result = adjusted(state, tally, largest_tokens=held * length, in_place=in_place, grow_back=True)
        if result.reason == "headroom":
            grown.append(step + 1)
        if result.reason == "pressure":
            assert result.state.train.caps.max_samples < state.train.caps.max_samples
        state = result.state
    least = GROW_AFTER_STEPS * (1 if in_place else 10)
    assert all(later - earlier >= least for earlier, later in pairwise(grown))
