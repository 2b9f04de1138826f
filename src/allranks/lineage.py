"""Which events of a run count: a run that goes on from a checkpoint gives up the steps that were made after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_RESUMED = {"resume": "step", "respawn": "resumed_step"}
"""Kinds of event after which a run goes on from an earlier step, and the field that says which."""


def last_step(events: Iterable[dict[str, Any]]) -> int:
    """The last optimizer step that counts; 0 before the first."""
    return max((event["step"] for event in committed(events, "step")), default=0)


def committed(events: Iterable[dict[str, Any]], kind: str) -> tuple[dict[str, Any], ...]:
    """The events of `kind`, in the order of their steps, that no later event of the log gave up."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] in _RESUMED:
            kept = [earlier for earlier in kept if earlier["step"] <= event[_RESUMED[event["kind"]]]]
        elif event["kind"] == kind:
            kept = [earlier for earlier in kept if earlier["step"] < event["step"]]
            kept.append(event)
    return tuple(kept)
