"""`allranks drill --matrix`: one fault after another on this machine, each in a run of its own with a small model."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TextIO, TypeVar, get_args

import typer

from allranks.cli.run import Order, plan_of, start
from allranks.errors import ExitCode, Problem, ProblemsError
from allranks.launch.local import stops_go_to
from allranks.launch.logs import Console
from allranks.launch.outcome import Outcome
from allranks.plan.plan import FaultKind, Injection, Phase, Plan
from allranks.plan.planner import SMOKE_STEPS
from allranks.report.matrix import Cell, cell, matrix_table
from allranks.rundir import replace_text
from allranks.units import human_seconds, plural

PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[FaultKind, ...] = ("oom", "alloc", "error", "exit", "sigkill", "sigstop", "hang")
MATRIX_FILE = "matrix.json"
LOG_FILE = "matrix.log"
T = TypeVar("T", bound=str)
_STEP = 2
_HANG_TIMEOUT_S = 20.0
"""Of these small runs: loading takes longer than this only where nothing moves."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What `drill --matrix` is going to do; nothing is written yet.

    Attributes:
        order: what the command line asks for, and found to be right.
        work_dir: folder for the small model, its data and the runs.
        ranks: in words, e.g. ``ddp on 2 cpu ranks``.
        faults: one run each, after one without a fault.
    """

    order: Order
    work_dir: Path
    ranks: str
    faults: tuple[Injection, ...]


def plan_matrix(order: Order, *, phases: Sequence[str], kinds: Sequence[str], work_dir: Path) -> Matrix:
    """Every fault of `phases` × `kinds` on the last rank.

    Args:
        order: what the command line asks for.
        phases: some of `PHASES`; none: all.
        kinds: some of `KINDS`; none: all.
        work_dir: see `Matrix`.

    Raises:
        ProblemsError: unknown phases or kinds.
        AllranksError: whatever else is wrong with what the user gave.
    """
    wanted_phases = _chosen("--phases", phases, PHASES)
    wanted_kinds = _chosen("--kinds", kinds, KINDS)
    order = replace(order, smoke=True, resume="never")
    plan = plan_of(order)
    faults = tuple(
        Injection(rank=plan.world_size - 1, step=SMOKE_STEPS if phase == "final" else _STEP, phase=phase, kind=kind)
        for phase in wanted_phases
        for kind in wanted_kinds
        if plan.world_size > 1 or (phase != "reduce" and kind != "sigstop")  # who shall notice a lone one?
    )
    ranks = f"{plan.profile_kind} on {plural(plan.world_size, f'{plan.device} rank')}"
    return Matrix(order=order, work_dir=work_dir, ranks=ranks, faults=faults)


def show_matrix(matrix: Matrix) -> None:
    """Print what `run_matrix` would do, as comments of a shell."""
    typer.echo(f"# {matrix.ranks}: {plural(len(matrix.faults) + 1, 'small run')} of {SMOKE_STEPS} steps each")
    typer.echo(f"# in {matrix.work_dir}, one without a fault, then one for each of these faults:")
    for (phase, step), faults in groupby(matrix.faults, key=lambda fault: (fault.phase, fault.step)):
        where = "load" if phase == "load" else f"{phase} of step {step}"
        typer.echo(f"#   {where}: {', '.join(fault.kind for fault in faults)}")


def run_matrix(matrix: Matrix, *, grace_s: float) -> ExitCode:
    """Run every fault of `matrix`, and print what all ranks did about it.

    The table is kept after each of them. A stop signal ends the run that goes on, and with it the matrix.

    Args:
        matrix: what to run.
        grace_s: as for a run.

    Returns:
        CRASH if a fault did not happen or a run ended otherwise than the undisturbed one; INTERRUPTED on a stop
        signal; as the undisturbed run ended, if it failed.
    """
    cells: list[Cell] = []
    said = Console(sys.stdout)
    try:
        with stops_go_to(signal.default_int_handler):  # between two runs too, which see to them by themselves
            failed = _run_all(matrix, cells, said, grace_s)
    except KeyboardInterrupt:
        _tell(matrix, cells, said)
        done = f"{len(cells)} of {len(matrix.faults)} faults"
        Console(sys.stderr).line(f"allranks: exit code {int(ExitCode.INTERRUPTED)}: stopped on request after {done}")
        return ExitCode.INTERRUPTED
    if failed is not None:
        Console(sys.stderr).line(
            f"allranks: exit code {int(failed.exit_code)}: the run without a fault did not end well, so no fault was "
            f"tried: {failed.message}"
        )
        return failed.exit_code
    _tell(matrix, cells, said)
    return ExitCode.OK if all(_as_documented(each) for each in cells) else ExitCode.CRASH


def _run_all(matrix: Matrix, cells: list[Cell], said: Console, grace_s: float) -> Outcome | None:
    """Fill `cells`; or return how the run without a fault ended, if it failed.

    Raises:
        KeyboardInterrupt: on a stop signal.
    """
    work_dir = matrix.work_dir
    order = replace(matrix.order, overrides=(*matrix.order.overrides, *_small(work_dir)))
    with (work_dir / LOG_FILE).open("w", encoding="utf-8") as log:
        aside = _Aside(log, said)
        said.line(
            f"allranks drill: small runs in {work_dir}, first one without a fault; what they say is in {LOG_FILE}"
        )

        def run(name: str, *injections: Injection) -> tuple[Plan, Outcome]:
            plan = plan_of(replace(order, name=name, injections=injections))
            outcome = start(plan, grace_s=grace_s, console=aside)
            if outcome.stop_asked:  # a run so small may have ended before it saw that
                raise KeyboardInterrupt
            return plan, outcome

        undisturbed, outcome = run("undisturbed")
        if outcome.exit_code is not ExitCode.OK:
            return outcome
        for number, fault in enumerate(matrix.faults, start=1):
            plan, _ = run(f"{fault.phase}-{fault.kind}", fault)
            cells.append(cell(fault, Path(plan.run_dir), Path(undisturbed.run_dir)))
            _keep(work_dir, undisturbed, cells, of=len(matrix.faults))
            took = "" if cells[-1].seconds is None else f" in {human_seconds(cells[-1].seconds)}"
            said.line(f"[{number}/{len(matrix.faults)}] {fault.kind} in {fault.phase}: {cells[-1].tier}{took}")
    return None


def _tell(matrix: Matrix, cells: Sequence[Cell], said: Console) -> None:
    if not cells:
        return
    said.line(f"{matrix.ranks}:")
    for line in matrix_table(cells):
        said.line(line)
    said.line(f"allranks drill: the table as JSON: {matrix.work_dir / MATRIX_FILE}")


class _Aside(Console):
    """Writes into a file, and says to the person only what that one has to know at once."""

    def __init__(self, file: TextIO, person: Console) -> None:
        super().__init__(file)
        self._person = person

    def alert(self, text: str) -> None:
        super().alert(text)
        self._person.alert(text)


def _keep(work_dir: Path, undisturbed: Plan, cells: Sequence[Cell], *, of: int) -> None:
    table = {
        "profile": undisturbed.profile_kind,
        "world_size": undisturbed.world_size,
        "device": undisturbed.device,
        "faults": of,
        "cells": [asdict(each) for each in cells],
    }
    replace_text(work_dir / MATRIX_FILE, json.dumps(table, indent=1) + "\n")


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
    (work_dir / MATRIX_FILE).unlink(missing_ok=True)  # of a matrix that ran here before
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
