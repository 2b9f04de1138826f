"""What became of the faults of a drill, from the events of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.events import read_events
from allranks.plan.plan import Injection, Plan
from allranks.report.runs import RunReport, read_run
from allranks.report.screens import caps_words

_DEADLY = ("exit", "sigkill", "sigstop", "hang")
_SILENT = (*_DEADLY, "nan")
"""Kinds that leave no failure record: nobody is left to write it, or nothing was raised."""

_OPTIONAL = ("eval", "save", "final")
_MISSED = "did not happen, though the step was committed: a fault of allranks"


def drill_report(plan: Plan) -> list[str]:
    """One line per fault: whether it happened, and what all ranks did then."""
    run_dir = Path(plan.run_dir)
    report = read_run(run_dir)
    events = {rank: list(read_events(run_dir, rank)) for rank in {0, *(fault.rank for fault in plan.injections)}}
    return [f"drill: {_asked(fault)}: {_became(report, events, fault)}" for fault in plan.injections]


def _asked(fault: Injection) -> str:
    times = f" × {fault.times}" if fault.times > 1 else ""
    where = "while loading" if fault.phase == "load" else f"in {fault.phase} of step {fault.step}"
    return f"{fault.kind}{times} on rank {fault.rank} {where}"


def _became(report: RunReport, events: Mapping[int, Sequence[dict[str, Any]]], fault: Injection) -> str:
    step = 0 if fault.phase == "load" else fault.step
    seen = [
        event
        for event in events[fault.rank]
        if event["kind"] == "failure" and event["step"] == step and event["phase"] == fault.phase
    ]
    respawns = [
        event
        for event in events[0]
        if event["kind"] == "respawn" and (fault.phase == "load" or event["step"] == step)
        # Of a hang inside a collective nobody knows whose fault it is.
        if event["failed_rank"] is None or (event["failed_rank"], event["phase"]) == (fault.rank, fault.phase)
    ]
    retries = [e for e in report.incidents if e["kind"] == "retry" and e["step"] == step]
    committed = report.step >= step and fault.phase != "load"
    if fault.kind in _DEADLY:
        # By the rank itself: when it dies in the optimizer step, its peers may have committed the step.
        own = (event["step"] for event in events[fault.rank] if event["kind"] == "step")
        committed = committed and step in own
    if report.verdict is None:
        end = "the run died without a verdict"
    else:
        end = f"the run ended: {report.verdict.reason.replace('_', ' ')} at step {report.verdict.step}"
    if respawns:
        times = f"happened {len(respawns)} time{'s' if len(respawns) != 1 else ''}"
        if committed or (fault.phase == "load" and report.step > 0):
            resumed = respawns[-1]["resumed_step"]
            return f"{times}; all ranks were started again, went on from step {resumed}, and passed it"
        return f"{times}; all ranks were started again; {end}"
    if not seen and committed:
        return (
            f"did not happen: step {step} was committed without {fault.phase}" if fault.phase in _OPTIONAL else _MISSED
        )
    reached = step <= report.step + 1
    if not seen and not (reached and fault.kind in _SILENT):
        return f"did not happen; {end}"
    happened = f"happened {len(seen)} time{'s' if len(seen) != 1 else ''}" if seen else "left no record"
    if retries and committed:
        caps = caps_words(retries[-1]["caps"])
        return f"{happened}; all ranks took the step again with {caps}, and committed it"
    return f"{happened}; {end}"
