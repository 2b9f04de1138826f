"""What became of the faults of a drill, from the events of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.events import read_events
from allranks.plan.plan import Injection, Plan
from allranks.report.runs import RunReport, read_run
from allranks.report.screens import caps_words
from allranks.rundir import injected_dir

_DEADLY = ("exit", "sigkill", "sigstop", "hang")
_OPTIONAL = ("eval", "save", "final")
_MISSED = "did not happen, though the step was committed: a fault of allranks"


def drill_report(plan: Plan) -> list[str]:
    """One line per fault: whether it happened, and what all ranks did then."""
    run_dir = Path(plan.run_dir)
    report = read_run(run_dir)
    events = {rank: list(read_events(run_dir, rank)) for rank in {0, *(fault.rank for fault in plan.injections)}}
    marks = [path.name for path in injected_dir(run_dir, report.launches).glob("*-*")]
    return [
        f"drill: {_asked(fault)}: "
        + _became(report, events, fault, fired=sum(mark.startswith(f"{number}-") for mark in marks))
        for number, fault in enumerate(plan.injections)
    ]


def _asked(fault: Injection) -> str:
    times = f" × {fault.times}" if fault.times > 1 else ""
    where = "while loading" if fault.phase == "load" else f"in {fault.phase} of step {fault.step}"
    return f"{fault.kind}{times} on rank {fault.rank} {where}"


def _became(report: RunReport, events: Mapping[int, Sequence[dict[str, Any]]], fault: Injection, *, fired: int) -> str:
    step = 0 if fault.phase == "load" else fault.step
    respawns = [
        event
        for event in events[0]
        if event["kind"] == "respawn" and (fault.phase == "load" or event["step"] == step)
        # Of a hang inside a collective nobody knows whose fault it is.
        if event["failed_rank"] is None or (event["failed_rank"], event["phase"]) == (fault.rank, fault.phase)
    ]
    retries = [e for e in report.incidents if e["kind"] == "retry" and e["step"] == step]
    if fault.phase == "final":
        passed = report.state == "finished"
    elif fault.phase in _OPTIONAL:
        told = [event for event in events[0] if event["kind"] == fault.phase]
        passed = any(event["step"] == step for event in (*told, *(report.saves if fault.phase == "save" else ())))
    else:
        passed = report.step >= max(step, 1)
    if fault.kind in _DEADLY and fault.phase != "load":
        # By the rank itself: when it dies in the optimizer step, its peers may have committed the step.
        passed = passed and any(event["kind"] == "step" and event["step"] == step for event in events[fault.rank])
    if report.verdict is None:
        end = "the run died without a verdict"
    else:
        end = f"the run ended: {report.verdict.reason.replace('_', ' ')} at step {report.verdict.step}"
    if not fired:
        if report.step < max(step, 1):
            return f"did not happen; {end}"
        return f"did not happen: step {step} has no {fault.phase}" if fault.phase in _OPTIONAL else _MISSED
    happened = f"happened {_times(fired)}"
    if not passed:
        again = f"; all ranks were started again {_times(len(respawns))}" if respawns else ""
        return f"{happened}{again}; {end}"
    if respawns:
        resumed = respawns[-1]["resumed_step"]
        return f"{happened}; all ranks were started again, went on from step {resumed}, and passed it"
    if retries:
        if fault.phase == "save":
            return f"{happened}; all ranks took it again, and it was written"
        caps = caps_words(retries[-1]["caps"])
        return f"{happened}; all ranks took the step again with {caps}, and committed it"
    return f"{happened}; {end}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
