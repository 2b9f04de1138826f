"""`allranks runs` lists runs; `allranks show` tells all about one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from allranks.config.fields import nearest
from allranks.errors import UserError
from allranks.plan.plan import PLAN_FILE
from allranks.report.runs import find_runs, read_run
from allranks.report.screens import as_json, run_screen, runs_table

_WIDEST = 120
_PIPE_WIDTH = 1000
"""Nothing is cut or wrapped for another program."""

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or its name in runs/.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add `runs` and `show`."""
    app.command(epilog="Example: allranks runs runs/ --json")(runs)
    app.command(epilog="Example: allranks show demo")(show)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the runs.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs of a folder, latest first."""
    reports, unreadable = find_runs(folder)
    for line in unreadable:
        typer.echo(line, err=True)
    if json:
        typer.echo(as_json([report.summary() for report in reports]))
    elif reports:
        typer.echo("\n".join(runs_table(reports, _width())))
    else:
        typer.echo(f"no runs in {folder}", err=True)


def show(
    run: RunName,
    json: Json = False,
) -> None:
    """Tell all about one run: losses, failures, checkpoints, verdict."""
    report = read_run(find_run_dir(run))
    typer.echo(as_json(report.detail()) if json else "\n".join(run_screen(report, _width())))


def find_run_dir(run: str) -> Path:
    """The run directory that is meant by its path or by its name.

    Raises:
        UserError: there is none; names the runs in runs/.
    """
    if not run:
        raise UserError("RUN is empty\n    fix: give the path of a run directory, or its name in runs/")
    candidates = (Path(run), Path("runs") / run)
    for path in candidates:
        if (path / PLAN_FILE).is_file():
            return path
    known = sorted(path.parent.name for path in Path("runs").glob(f"*/{PLAN_FILE}"))
    near = nearest(Path(run).name, known) or next((name for name in known if name.startswith(run)), None)
    lines = [
        f"{run}: no such run, neither as a path nor in runs/",
        *([f"nearest: {near}"] if near is not None else []),
        *([f"valid: {', '.join(known)}"] if known else []),
        "fix: give the path of its directory, or list the runs of a folder with `allranks runs DIR`",
    ]
    raise UserError("\n    ".join(lines))


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _PIPE_WIDTH
