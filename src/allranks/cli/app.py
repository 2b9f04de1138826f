"""The `allranks` command: its parts, and how errors become messages and exit codes."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Annotated

import typer

from allranks import __version__
from allranks.cli import config, drill, evaluate, profiles, run, runs
from allranks.errors import AllranksError, ExitCode

COMMANDS: tuple[Callable[[typer.Typer], None], ...] = (
    run.register,
    drill.register,
    runs.register,
    evaluate.register,
    config.register,
    profiles.register,
)
"""Each command module adds its own commands, in this order."""


def build_app() -> typer.Typer:
    """The command with all its parts."""
    app = typer.Typer(
        name="allranks",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )

    @app.callback(epilog="Example: allranks run run.yaml --profile zero2 --smoke")
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
        ] = False,
    ) -> None:
        """Fine-tune quantised language models on many GPUs, all ranks acting together."""

    for register in COMMANDS:
        register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"allranks {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except AllranksError as error:
        print(_fitted(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None:
            raise  # a file of ours: the traceback says where
        # Standard output is full or gone; the interpreter would fail once more when it flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"allranks: the output can't be written: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.CRASH)


def _fitted(message: str) -> str:
    """`message` with long lines wrapped below their own indent, if a terminal shows it."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines = []
    for line in message.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False) or [""]
    return "\n".join(lines)
