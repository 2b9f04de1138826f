"""`allranks drill --matrix`: one fault after another on this machine, each in a run of its own with a small model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar, get_args

import typer

from allranks.cli.run import Order, plan_of, start
from allranks.errors import ExitCode, Problem, ProblemsError
from allranks.launch.logs import Console
from allranks.plan.plan import FaultKind, Injection, Phase, Plan
from allranks.plan.planner import SMOKE_STEPS
from allranks.report.matrix import Cell, cell, matrix_table
from allranks.rundir import replace_text
from allranks.units import human_seconds

PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[FaultKind, ...] = ("oom", "alloc", "error", "exit", "sigkill", "sigstop", "hang")
MATRIX_FILE = "matrix.json"
T = TypeVar("T", bound=str)
_STEP = 2
_HANG_TIMEOUT_S = 20.0
"""Of these small runs: loading takes longer than this only where nothing moves."""


def run_matrix(
    order: Order, *, phases: Sequence[str], kinds: Sequence[str], grace_s: float, work_dir: Path
) -> ExitCode:
    """Run every fault of `phases` × `kinds` on the last rank, and print what all ranks did about it.

    Args:
        order: what the command line asks for; model and data are replaced by small ones.
        phases: some of `PHASES`; none: all.
        kinds: some of `KINDS`; none: all.
        grace_s: as for a run.
        work_dir: folder for the model, the data and the runs.

    Returns:
        CRASH if a fault did not happen or a run ended otherwise than the undisturbed one.

    Raises:
        ProblemsError: unknown phases or kinds.
    """
    wanted_phases = _chosen("--phases", phases, PHASES)
    wanted_kinds = _chosen("--kinds", kinds, KINDS)
    order = replace(order, overrides=(*order.overrides, *_small(work_dir)), smoke=True, resume="never")
    quiet = Console(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # it lives as long as the process
    said = Console(sys.stdout)

    def run(name: str, injections: tuple[Injection, ...] = ()) -> Plan:
        plan = plan_of(replace(order, name=name, injections=injections))
        start(plan, grace_s=grace_s, console=quiet)
        return plan

    said.line(f"allranks drill: small runs in {work_dir}; first one without a fault")
    undisturbed = run("undisturbed")
    last_rank = undisturbed.world_size - 1
    faults = [
        Injection(rank=last_rank, step=SMOKE_STEPS if phase == "final" else _STEP, phase=phase, kind=kind)
        for phase in wanted_phases
        for kind in wanted_kinds
        if undisturbed.world_size > 1 or (phase != "reduce" and kind != "sigstop")  # who shall notice a lone one?
    ]
    cells: list[Cell] = []
    for number, fault in enumerate(faults, start=1):
        name = f"{fault.phase}-{fault.kind}"
        plan = run(name, (fault,))
        cells.append(cell(fault, Path(plan.run_dir), Path(undisturbed.run_dir)))
        took = "" if cells[-1].seconds is None else f" in {human_seconds(cells[-1].seconds)}"
        said.line(f"[{number}/{len(faults)}] {fault.kind} in {fault.phase}: {cells[-1].tier}{took}")
    replace_text(
        work_dir / MATRIX_FILE,
        json.dumps(
            {
                "profile": undisturbed.profile_kind,
                "world_size": undisturbed.world_size,
                "device": undisturbed.device,
                "cells": [asdict(each) for each in cells],
            },
            indent=1,
        )
        + "\n",
    )
    said.line(f"{undisturbed.profile_kind} on {undisturbed.world_size} {undisturbed.device} ranks:")
    for line in matrix_table(cells):
        said.line(line)
    said.line(f"allranks drill: the table as JSON: {work_dir / MATRIX_FILE}")
    return ExitCode.OK if all(_as_documented(each) for each in cells) else ExitCode.CRASH


def _as_documented(each: Cell) -> bool:
    """The run went on as if nothing had happened, or stopped where nothing can be done."""
    stops = each.fault.phase == "load" and each.fault.kind in ("oom", "alloc", "error")
    return each.tier == "stop" if stops else each.as_undisturbed


def _chosen(option: str, given: Sequence[str], valid: tuple[T, ...]) -> tuple[T, ...]:
    names = tuple(name.strip() for text in given for name in text.split(",") if name.strip())
    problems = [
        Problem(path=option, message=f"{name!r} is none of them", choices=valid) for name in names if name not in valid
    ]
    if problems:
        raise ProblemsError("allranks drill --matrix", problems)
    return tuple(name for name in valid if not names or name in names)


def _small(work_dir: Path) -> tuple[str, ...]:
    """Write the small model and set once, and return the overrides that use them."""
    from allranks.demo.tiny import write_tiny_llama, write_tiny_set

    work_dir.mkdir(parents=True, exist_ok=True)
    model, train, evaluation = (work_dir / name for name in ("model", "train.jsonl", "eval.jsonl"))
    if not (model / "config.json").exists():
        typer.echo("allranks drill: making a small model with random weights", err=True)
        write_tiny_llama(model)
    write_tiny_set(train, samples=60, seed=1)
    write_tiny_set(evaluation, samples=11, seed=2)
    values = {
        "model.name_or_path": str(model),
        "model.task": "causal-lm",
        "data.train": str(train),
        "data.eval": str(evaluation),
        "data.max_length": 128,
        "training.global_batch_size": 8,
        "training.per_device_train_batch_size": 4,
        "training.gradient_accumulation_steps": None,
        "training.eval_steps": 1,
        "output.save_steps": 1,
        "output.dir": str(work_dir / "runs"),
        "oom.hang_timeout_s": _HANG_TIMEOUT_S,
    }
    return tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
