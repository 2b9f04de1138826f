"""`allranks run`: from run.yaml to a finished run, or to one clear message."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from allranks import environment
from allranks.cli.config import ConfigFile, Overrides
from allranks.config.load import load_run_config
from allranks.errors import ExitCode, UserError
from allranks.launch.command import LaunchRequest, build_launch, render_dry_run
from allranks.launch.destination import destination
from allranks.launch.local import GRACE_S
from allranks.launch.local import run as run_launch
from allranks.launch.logs import Console
from allranks.launch.outcome import Outcome
from allranks.plan.hardware import detect
from allranks.plan.plan import PLAN_FILE, Injection, Plan
from allranks.plan.planner import make_plan, run_directory
from allranks.profiles import check_profile_against_run, load_profile
from allranks.rundir import launch_lock, next_launch, replace_text, unwritable

ProfileName = Annotated[
    str,
    typer.Option(
        "--profile", metavar="NAME", help="Profile, or an accelerate config file; required.", show_default=False
    ),
]
Resume = Literal["auto", "must", "never"]


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"{text!r} is not a number of ranks; give a whole number from 1, or leave it out")
    return int(text)


def _resume(text: str) -> str:
    if text not in get_args(Resume):
        raise typer.BadParameter(f"{text!r} is none of: {', '.join(get_args(Resume))}")
    return text


Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", help="Ranks; default: one per visible GPU.", show_default=False, parser=_ranks),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the run directory.", show_default=False),
]
Grace = Annotated[
    float,
    typer.Option("--grace", metavar="S", min=0, help="Seconds to save and leave after Ctrl-C or SIGTERM."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and the command as shell text; start and write nothing.")
]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the command line asks for.

    Attributes:
        config_file: run.yaml.
        overrides: values of ``--set``.
        profile: name or path of the profile.
        gpus: ranks, if given.
        name: name of the run directory, if given.
        suffix: put behind the name of a run that must not touch the real one's directory.
        resume: see `Plan`.
        smoke: 3 steps, one evaluation, one save.
        injections: faults to make happen.
    """

    config_file: Path
    overrides: tuple[str, ...]
    profile: str
    gpus: int | None
    name: str | None
    suffix: str = ""
    resume: Resume = "auto"
    smoke: bool = False
    injections: tuple[Injection, ...] = ()


def register(app: typer.Typer) -> None:
    """Add `run`."""
    app.command(epilog="Example: allranks run run.yaml --profile zero2 --gpus 2 --smoke")(run)


def run(
    config_file: ConfigFile,
    profile: ProfileName = "",
    gpus: Gpus = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="3 steps, one evaluation if data.eval is set, one save, in NAME-smoke.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="[auto|must|never]",
            help="Go on from the run's checkpoint: if there is one, or fail, or never.",
            parser=_resume,
        ),
    ] = "auto",
    name: Name = None,
    overrides: Overrides = None,
    grace: Grace = GRACE_S,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune as run.yaml says; the same command resumes."""
    if smoke and resume == "must":
        raise UserError("--resume must contradicts --smoke, which always starts anew\n    fix: leave out one of them")
    plan = plan_of(
        Order(
            config_file=config_file,
            overrides=tuple(overrides or ()),
            profile=profile,
            gpus=gpus,
            name=name,
            suffix="-smoke" if smoke else "",
            resume="never" if smoke else cast("Resume", resume),
            smoke=smoke,
        )
    )
    if dry_run:
        show(plan)
        return
    raise typer.Exit(start(plan, grace_s=grace).exit_code)


def plan_of(order: Order) -> Plan:
    """Everything that is decided before a process starts; writes nothing.

    Raises:
        AllranksError: all that is wrong with what the user gave.
    """
    profile = load_profile(order.profile)
    config = load_run_config(
        order.config_file,
        order.overrides,
        name=order.name,
        contradictions=partial(check_profile_against_run, profile),
    )
    wanted = run_directory(config, order.config_file)
    goal = destination(wanted.with_name(wanted.name + order.suffix), config, order.resume)
    plan = make_plan(
        config,
        profile,
        detect(),
        run_dir=goal.run_dir,
        gpus=order.gpus,
        smoke=order.smoke,
        resume=order.resume,
        injections=order.injections,
        recorded_global_batch=goal.recorded_global_batch,
    )
    return replace(plan, notes=(*goal.notes, *plan.notes))


def show(plan: Plan) -> None:
    """Print what `start` would do, as shell text."""
    launch = next_launch(Path(plan.run_dir))
    typer.echo(render_dry_run(_request(plan, launch, live_line=False), plan), nl=False)


def start(plan: Plan, *, grace_s: float, console: Console | None = None) -> Outcome:
    """Start the ranks and stay until the last of them is gone, saying on the way what there is to say.

    Args:
        plan: what to run.
        grace_s: seconds to save and leave after a stop signal.
        console: where to say it; default: standard output, and errors to standard error.

    Raises:
        UserError: the run directory is in use, or can't be written.
    """
    run_dir = Path(plan.run_dir)
    errors = console
    console = console or Console(sys.stdout)
    with launch_lock(run_dir) as unlocked:
        launch = next_launch(run_dir)
        request = _request(plan, launch, live_line=console.is_terminal)
        notes = (*plan.notes, *request.notes, *((unlocked,) if unlocked else ()))
        plan = replace(plan, notes=notes)
        try:
            replace_text(run_dir / PLAN_FILE, plan.to_json())
        except OSError as error:
            raise unwritable(str(run_dir / PLAN_FILE), error) from error
        ranks = f"{plan.world_size} {plan.device} rank{'s' if plan.world_size > 1 else ''}"
        console.line(
            f"allranks: {plan.name} · launch {launch} · {plan.profile_kind} on {ranks} · "
            f"global batch {plan.global_batch_size}"
        )
        for note in plan.notes:
            console.line(f"allranks: {note}")
        console.line(f"allranks: logs in {_near(request.log_dir)}")
        outcome = run_launch(request, run_dir, world_size=plan.world_size, console=console, grace_s=grace_s)
    _conclude(outcome, run_dir, console, errors)
    return outcome


def _request(plan: Plan, launch: int, *, live_line: bool) -> LaunchRequest:
    return build_launch(
        plan,
        port=0,
        launch_no=launch,
        environ=environment.inherited(),
        python=sys.executable,
        live_line=live_line,
    )


def _conclude(outcome: Outcome, run_dir: Path, console: Console, errors: Console | None) -> None:
    """The last words: what the user needs most stands last on the screen."""
    if outcome.exit_code is ExitCode.OK:
        console.line(f"allranks: finished; all about it: allranks show {shlex.quote(_near(run_dir))}")
        return
    errors = errors or Console(sys.stderr)  # which may be gone, if it was a terminal that closed
    if outcome.log is not None and outcome.tail:
        errors.line(f"allranks: the last lines of {_near(outcome.log)}:")
        for line in outcome.tail:
            errors.line(f"    {line}")
    errors.line(f"allranks: exit code {int(outcome.exit_code)}: {outcome.message}")


def _near(path: Path) -> str:
    """`path` as short as it can be given from the working directory."""
    return min(str(path), os.path.relpath(path), key=len)
