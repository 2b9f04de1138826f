"""What a run directory says about its run: read from plan, events, verdict and lock, nothing written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allranks.checkpoints.published import published
from allranks.checkpoints.store import CHECKPOINTS_DIR
from allranks.errors import UserError
from allranks.events import EVENTS_DIR, read_events
from allranks.lineage import committed, last_step
from allranks.plan.plan import PLAN_FILE, Plan
from allranks.rundir import is_held, next_launch
from allranks.train.schedule import total_steps
from allranks.verdict import VERDICT_FILE, Reason, Verdict, read_verdict

Event = dict[str, Any]
State = Literal["running", "planned", "died"] | Reason
"""A verdict's reason; ``running``: a launcher holds the run; ``planned``: never started; ``died``: no verdict."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One run, as its directory tells it.

    Attributes:
        run_dir: path of the run directory.
        plan: of the latest launch.
        state: what it is doing, or how it ended.
        launches: how often it was started.
        updated: Unix time of the last sign of life.
        step: last committed step.
        total_steps: of the whole run; None before the data is known.
        notes: what differed from what was asked, in the latest launch.
        data: fields of the latest ``data`` event, if there is one.
        model: fields of the latest ``model`` event, if there is one.
        logs: ``log`` events of the committed steps.
        evaluations: ``eval`` events, likewise.
        incidents: failures of all ranks, retries, restarts of the ranks, skipped steps, failed saves and resumptions,
            in order of time.
        saves: ``save`` events of the checkpoints that count, oldest first; of one whose event was lost with the ranks,
            ``step``, ``path`` and ``bytes``, and None for ``seconds``.
        verdict: how the latest launch ended, if it did.
    """

    run_dir: Path
    plan: Plan
    state: State
    launches: int
    updated: float
    step: int
    total_steps: int | None
    notes: tuple[str, ...]
    data: Event | None
    model: Event | None
    logs: tuple[Event, ...]
    evaluations: tuple[Event, ...]
    incidents: tuple[Event, ...]
    saves: tuple[Event, ...]
    verdict: Verdict | None

    @property
    def loss(self) -> float | None:
        """Training loss of the last logged step."""
        return float(self.logs[-1]["loss"]) if self.logs else None

    @property
    def eval_loss(self) -> float | None:
        """Loss of the last evaluation."""
        return float(self.evaluations[-1]["loss"]) if self.evaluations else None

    def summary(self) -> dict[str, Any]:
        """The run in one line, for JSON."""
        return {
            "name": self.plan.name,
            "run_dir": str(self.run_dir),
            "profile": self.plan.profile_kind,
            "ranks": self.plan.world_size,
            "device": self.plan.device,
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "state": self.state,
            "launches": self.launches,
            "updated": self.updated,
        }

    def detail(self) -> dict[str, Any]:
        """All of the run, for JSON."""
        verdict = self.verdict
        return {
            **self.summary(),
            "global_batch_size": self.plan.global_batch_size,
            "mixed_precision": self.plan.mixed_precision,
            "config": self.plan.config.model_dump(),
            "notes": self.notes,
            "data": self.data,
            "model": self.model,
            "logs": self.logs,
            "evaluations": self.evaluations,
            "incidents": self.incidents,
            "saves": self.saves,
            "verdict": None
            if verdict is None
            else {
                "reason": verdict.reason,
                "message": verdict.message,
                "exit_code": int(verdict.exit_code),
                "step": verdict.step,
            },
        }


def find_runs(folder: Path) -> tuple[list[RunReport], list[str]]:
    """The runs in `folder`, latest first, and a line for each that can't be read.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder\n    fix: give the folder that holds the runs, output.dir of run.yaml"
        )
    reports, unreadable = [], []
    for plan_file in sorted(folder.glob(f"*/{PLAN_FILE}")):
        try:
            reports.append(read_run(plan_file.parent))
        except UserError as error:
            unreadable.append(str(error))
    return sorted(reports, key=lambda report: report.updated, reverse=True), unreadable


def read_run(run_dir: Path) -> RunReport:
    """Read one run directory.

    Raises:
        UserError: it is none, it can't be read, or another version of allranks wrote it.
    """
    try:
        plan = Plan.read(run_dir)
        verdict = read_verdict(run_dir)
        events, incidents = list(read_events(run_dir)), _incidents(run_dir)
    except FileNotFoundError:
        raise UserError(
            f"{run_dir}: not a run directory (no {PLAN_FILE} in it)\n    fix: list the runs with `allranks runs`"
        ) from None
    except OSError as error:  # of another user, for one
        raise UserError(f"{run_dir}: {error.filename} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{run_dir}: can't be read by this version of allranks: {error}") from error
    launches = next_launch(run_dir) - 1
    latest = {event["kind"]: event for event in events}
    data = latest.get("data")
    logs = committed(events, "log")
    return RunReport(
        run_dir=run_dir,
        plan=plan,
        state=_state(run_dir, verdict, started=launches > 0 or bool(events)),
        launches=max([launches, *(event["launch"] for event in events)]),
        updated=_updated(run_dir, events),
        step=last_step(events),
        total_steps=None if data is None else _total_steps(plan, data["samples"]),
        notes=_notes(plan, events),
        data=data,
        model=latest.get("model"),
        logs=logs,
        evaluations=committed(events, "eval"),
        incidents=incidents,
        saves=_saves(run_dir / CHECKPOINTS_DIR, events),
        verdict=verdict,
    )


def _state(run_dir: Path, verdict: Verdict | None, *, started: bool) -> State:
    if is_held(run_dir):
        return "running"
    if verdict is not None:
        return verdict.reason
    return "died" if started else "planned"


def _total_steps(plan: Plan, samples: int) -> int:
    return total_steps(plan.config.training, math.ceil(samples / plan.global_batch_size), smoke=plan.smoke)


def _updated(run_dir: Path, events: list[Event]) -> float:
    files = [path.stat().st_mtime for name in (PLAN_FILE, VERDICT_FILE) if (path := run_dir / name).exists()]
    return max([*files, *(float(event["time"]) for event in events[-1:])])


def _notes(plan: Plan, events: list[Event]) -> tuple[str, ...]:
    launch = max((event["launch"] for event in events), default=0)
    said = [event["message"] for event in events if event["kind"] == "note" and event["launch"] == launch]
    return tuple(dict.fromkeys((*plan.notes, *said)))


def _saves(folder: Path, events: list[Event]) -> tuple[Event, ...]:
    told = {event["path"]: event for event in events if event["kind"] == "save"}
    return tuple(
        told.get(
            ref.folder,
            {"step": ref.step, "path": ref.folder, "bytes": ref.bytes, "seconds": None},
        )
        for ref in reversed(published(folder, own=()).refs)
        if (folder / ref.folder).is_dir()
    )


def _incidents(run_dir: Path) -> tuple[Event, ...]:
    of_rank_0 = ("retry", "respawn", "caps", "skipped_step", "resume")
    found = [
        event
        for rank in _ranks(run_dir)
        for event in read_events(run_dir, rank)
        if event["kind"] == "failure" or (rank == 0 and event["kind"] in of_rank_0)
    ]
    return tuple(sorted(found, key=lambda event: float(event["time"])))


def _ranks(run_dir: Path) -> Iterator[int]:
    for path in (run_dir / EVENTS_DIR).glob("rank*.jsonl"):
        digits = path.stem.removeprefix("rank")
        if digits.isdecimal():
            yield int(digits)
