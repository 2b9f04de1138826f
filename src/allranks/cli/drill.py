"""`allranks drill`: a run in which faults happen on purpose, to see what a cluster and its settings do about them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from allranks.cli.config import ConfigFile, Overrides
from allranks.cli.matrix import KINDS, PHASES, plan_matrix, run_matrix, show_matrix
from allranks.cli.run import DryRun, Gpus, Grace, Name, Order, ProfileName, plan_of, show, start
from allranks.config.fields import nearest
from allranks.config.load import load_run_config
from allranks.errors import Problem, ProblemsError, UserError
from allranks.launch.local import GRACE_S
from allranks.launch.logs import Console
from allranks.plan.plan import FaultKind, Injection, Phase
from allranks.plan.planner import run_directory
from allranks.report.drill import drill_report

_EXAMPLE = "rank=1,step=3,phase=backward,kind=oom"
_NUMBERS = {"rank": 0, "step": 1, "times": 1}
"""Keys that take a number, with the least valid one."""

_WORDS: dict[str, tuple[str, ...]] = {"phase": get_args(Phase), "kind": get_args(FaultKind)}
_KEYS = ("rank", "step", "phase", "kind", "times")


def register(app: typer.Typer) -> None:
    """Add `drill`."""
    app.command(epilog=f"Example: allranks drill run.yaml --profile zero2 --inject {_EXAMPLE},times=2")(drill)


def drill(
    config_file: ConfigFile,
    profile: ProfileName = "",
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help=f"A fault as {_EXAMPLE}[,times=2]; may be repeated.", show_default=False),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="One fault after another, each in a run of its own with a small model.")
    ] = False,
    phases: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help=f"Of the matrix, from: {', '.join(PHASES)}.", show_default=False),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help=f"Of the matrix, from: {', '.join(KINDS)}.", show_default=False),
    ] = None,
    gpus: Gpus = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="3 steps, one evaluation if data.eval is set, one save.")
    ] = False,
    name: Name = None,
    overrides: Overrides = None,
    grace: Grace = GRACE_S,
    dry_run: DryRun = False,
) -> None:
    """Run with faults on purpose, in a run directory of its own, NAME-drill."""
    order = Order(
        config_file=config_file,
        overrides=tuple(overrides or ()),
        profile=profile,
        gpus=gpus,
        name=name,
        suffix="-drill",
        resume="never",
        smoke=smoke,
        injections=parse_injections(inject or []),
    )
    if matrix == bool(inject):
        raise UserError("give either --inject, once or more, or --matrix\n    fix: --inject " + _EXAMPLE)
    if not matrix and (phases or kinds):
        raise UserError("--phases and --kinds choose from --matrix, which was not given\n    fix: add --matrix")
    if matrix:
        config = load_run_config(config_file, order.overrides, name=name)
        folder = run_directory(config, config_file)
        work_dir = folder.with_name(f"{name or folder.name}-matrix-{Path(profile).stem}")
        planned = plan_matrix(order, phases=phases or (), kinds=kinds or (), work_dir=work_dir)
        if dry_run:
            show_matrix(planned)
            return
        raise typer.Exit(run_matrix(planned, grace_s=grace))
    plan = plan_of(order)
    if dry_run:
        show(plan)
        return
    outcome = start(plan, grace_s=grace)
    errors = Console(sys.stderr)
    for line in drill_report(plan):
        errors.line(line)
    raise typer.Exit(outcome.exit_code)


def parse_injections(faults: list[str]) -> tuple[Injection, ...]:
    """The faults of ``--inject``.

    Raises:
        ProblemsError: everything that is wrong with all of them.
    """
    injections, problems = [], []
    for fault in faults:
        values, wrong = _values(fault)
        problems += wrong
        if not wrong:
            # mypy sees one type for all values; `_values` has made each what its field wants.
            injections.append(Injection(**values))  # type: ignore[arg-type]
    if problems:
        raise ProblemsError("--inject", problems)
    return tuple(injections)


def _values(fault: str) -> tuple[dict[str, int | str], list[Problem]]:
    values: dict[str, str] = {}
    problems = []
    unknown = False
    for part in fault.split(","):
        key, _, text = (word.strip() for word in part.partition("="))
        if key not in _KEYS:
            unknown = True
            problems.append(
                Problem(path=fault, message=f"unknown key {key!r}", choices=_KEYS, nearest=nearest(key, _KEYS))
            )
        elif key in values:
            problems.append(Problem(path=fault, message=f"{key} is given twice", fix="keep one of them"))
        else:
            values[key] = text
            problems += _wrong_value(fault, key, text)
    missing = [key for key in _KEYS if key not in values and key != "times"]
    if missing and not unknown:
        problems.append(
            Problem(path=fault, message=f"{', '.join(missing)} missing", fix=f"write all of them, as in {_EXAMPLE}")
        )
    if problems:
        return {}, problems
    return {key: int(value) if key in _NUMBERS else value for key, value in values.items()}, []


def _wrong_value(fault: str, key: str, text: str) -> list[Problem]:
    if key in _NUMBERS:
        if text.isascii() and text.isdecimal() and int(text) >= _NUMBERS[key]:
            return []
        return [Problem(path=fault, message=f"{key} is {text!r}", fix=f"give a whole number from {_NUMBERS[key]}")]
    if text in _WORDS[key]:
        return []
    valid = _WORDS[key]
    return [Problem(path=fault, message=f"{key} is {text!r}", choices=valid, nearest=nearest(text, valid))]
