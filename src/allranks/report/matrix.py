"""What became of each fault of a failure matrix, from the events of its run. Pure but for reading run directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allranks.events import read_events
from allranks.plan.plan import Injection
from allranks.report.runs import read_run
from allranks.report.screens import table
from allranks.units import human_seconds

Tier = Literal["in place", "restart", "stop", "none"]
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault and what became of it.

    Attributes:
        fault: what was injected.
        tier: ``in place``: the ranks retried; ``restart``: all started again; ``stop``: all stopped; ``none``: it did
            not happen.
        seconds: from the fault until the run had got past it, or had stopped; None if that is not known.
        words: what the run said.
        as_undisturbed: it finished with every step, the samples and the losses of the undisturbed run.
    """

    fault: Injection
    tier: Tier
    seconds: float | None
    words: str
    as_undisturbed: bool


def cell(fault: Injection, run_dir: Path, undisturbed: Path) -> Cell:
    """Read what became of `fault` in the run that had it alone.

    Args:
        fault: what was injected.
        run_dir: of that run.
        undisturbed: run directory of the same run without a fault.
    """
    report = read_run(run_dir)
    fired = sorted((run_dir / "injected").glob("L*/*"), key=lambda path: path.stat().st_mtime)
    words = "died without a verdict" if report.verdict is None else report.verdict.message
    if not fired:
        return Cell(fault=fault, tier="none", seconds=None, words=words, as_undisturbed=False)
    at = fired[0].stat().st_mtime
    events = list(read_events(run_dir))
    told = [event for event in events if event["time"] > at]
    tier: Tier = "stop"
    if report.state == "finished":
        tier = "restart" if any(event["kind"] == "respawn" for event in told) else "in place"
        words = next((e["message"] for e in told if e["kind"] == "respawn"), "all ranks took it again")
    seconds = next((event["time"] - at for event in told if _is_past(event, fault, tier)), None)
    return Cell(
        fault=fault,
        tier=tier,
        seconds=seconds,
        words=words,
        as_undisturbed=tier in ("in place", "restart") and _same_story(run_dir, undisturbed),
    )


def _is_past(event: dict[str, Any], fault: Injection, tier: Tier) -> bool:
    """The event with which the run has got past the fault, or has stopped."""
    if tier == "stop":
        return bool(event["kind"] == "stop")
    wanted = {"eval": "eval", "save": "save", "final": "finish"}.get(fault.phase, "step")
    return event["kind"] == wanted and (fault.phase == "load" or event["step"] >= fault.step)


def _same_story(run_dir: Path, undisturbed: Path) -> bool:
    """The samples of each step, and its loss to the tolerance."""
    mine, other = _story(run_dir), _story(undisturbed)
    return mine.keys() == other.keys() and all(
        mine[step][0] == other[step][0] and abs(mine[step][1] - other[step][1]) <= _LOSS_TOLERANCE for step in mine
    )


def _story(run_dir: Path) -> dict[int, tuple[tuple[int, ...], float]]:
    """By committed step, the samples and the loss, as the last life of each step has them."""
    return {
        event["step"]: (tuple(event["sample_ids"]), event["loss"])
        for event in read_events(run_dir)
        if event["kind"] == "step"
    }


def matrix_table(cells: Sequence[Cell]) -> list[str]:
    """One line per fault."""
    head = ("PHASE", "KIND", "RANK", "WHAT ALL RANKS DID", "SECONDS", "SAME RESULT")
    rows = [
        (
            cell.fault.phase,
            cell.fault.kind,
            str(cell.fault.rank),
            {"in place": "again, in place", "restart": "started again", "stop": "stopped", "none": "it did not happen"}[
                cell.tier
            ],
            "-" if cell.seconds is None else human_seconds(cell.seconds).removesuffix(" s"),
            "yes" if cell.as_undisturbed else "no",
        )
        for cell in cells
    ]
    return table((head, *rows), right=(2, 4))
