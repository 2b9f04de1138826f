"""Changes of the caps that no failure asks for: smaller under pressure, larger again when there is room. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from allranks.caps import Caps
from allranks.coordinator.ballots import Tally
from allranks.coordinator.policy_state import PolicyState
from allranks.units import human_bytes

PRESSED_STEPS = 3
"""So many steps in which the allocator had to free its cache are pressure."""
PRESSURE_WINDOW_STEPS = 20
"""Committed steps within which they must lie."""

_LEAST_GROWTH = 1.25
_MOST_GROWTH = 2.0
_COSTLY = 10
"""Times the patience where a growth that fails has all ranks start again."""


@dataclass(frozen=True, kw_only=True)
class Adjusted:
    """The policy after a committed step.

    Attributes:
        state: what to go on with.
        reason: why the caps changed; None: they did not.
        message: one line for the console; empty if nothing changed.
    """

    state: PolicyState
    reason: Literal["pressure", "headroom"] | None = None
    message: str = ""


def adjusted(state: PolicyState, tally: Tally, *, largest_tokens: int, in_place: bool, grow_back: bool) -> Adjusted:
    """What the next step is split by.

    Args:
        state: after the step was committed.
        tally: the vote of that step.
        largest_tokens: tokens of its largest micro-batch on any rank, padding included.
        in_place: a memory failure can be retried in place (`single`, `ddp`, `zero2`).
        grow_back: the caps may grow again, as far as they were configured.
    """
    step = tally.committed_step + 1
    if tally.pressed:
        recent = tuple(at for at in state.pressed_at if step - at < PRESSURE_WINDOW_STEPS)
        state = replace(state, pressed_at=(*recent, step))
        if len(state.pressed_at) >= PRESSED_STEPS:
            return _under_pressure(state, step, largest_tokens)
    elif grow_back:
        return _with_room(state, tally, step, largest_tokens, in_place=in_place)
    return Adjusted(state=state)


def _under_pressure(state: PolicyState, step: int, largest_tokens: int) -> Adjusted:
    """Three quarters: the work does fit, only barely."""
    caps = state.train.caps
    tokens = largest_tokens if caps.max_tokens is None else min(caps.max_tokens, largest_tokens)
    smaller = Caps(max_samples=max(1, caps.max_samples * 3 // 4), max_tokens=max(1, tokens * 3 // 4))
    state = replace(state, pressed_at=())
    if smaller.max_samples == caps.max_samples:
        return Adjusted(state=state)
    return Adjusted(
        state=replace(state, train=replace(state.train, caps=smaller), growth=state.growth.shrunk(step)),
        reason="pressure",
        message=f"the GPU memory is so full that its allocator had to free its cache in {PRESSED_STEPS} of the last "
        f"{PRESSURE_WINDOW_STEPS} steps; from here on {smaller.words()}",
    )


def _with_room(state: PolicyState, tally: Tally, step: int, largest_tokens: int, *, in_place: bool) -> Adjusted:
    """By as much as the least headroom of all ranks lets the largest micro-batch grow, up to the double."""
    caps, ceiling = state.train.caps, state.growth.ceiling
    patience = state.growth.patience_steps * (1 if in_place else _COSTLY)
    factor = tally.growth_factor
    if caps == ceiling or step - state.growth.changed_at < patience or factor is None or factor < _LEAST_GROWTH:
        return Adjusted(state=state)
    factor = min(factor, _MOST_GROWTH)
    # One sample more at least: the tokens are what keeps it in bounds.
    larger = Caps(
        max_samples=max(caps.max_samples + 1, int(caps.max_samples * factor)),
        max_tokens=None if caps.max_tokens is None else max(caps.max_tokens, int(largest_tokens * factor)),
    ).within(ceiling)
    if larger == caps:
        return Adjusted(state=state)
    return Adjusted(
        state=replace(state, train=replace(state.train, caps=larger), growth=state.growth.grown(step)),
        reason="headroom",
        message=f"after step {step} every rank had at least {human_bytes(tally.headroom_bytes or 0)} of GPU memory to "
        f"spare; from here on {larger.words()}",
    )
