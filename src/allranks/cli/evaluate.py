"""`allranks eval`: base model and adapter of a run side by side."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.runs import Json, RunName, find_run_dir
from allranks.report.runs import RunReport, read_run
from allranks.report.screens import as_json, table
from allranks.units import human_seconds

if TYPE_CHECKING:
    from allranks.train.standalone_eval import SideBySide

_WIDTH = 80


def register(app: typer.Typer) -> None:
    """Add `eval`."""
    app.command("eval", epilog="Example: allranks eval demo --data test.jsonl --json")(evaluate)


def evaluate(
    run: RunName,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PATH", help="Another set than the run's data.eval.", show_default=False),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="NAME", help="Split of the set.", show_default=False)
    ] = None,
    max_samples: Annotated[
        int | None,
        typer.Option("--max-samples", metavar="N", min=1, help="Only the first N samples.", show_default=False),
    ] = None,
    max_answer_tokens: Annotated[
        int,
        typer.Option("--max-answer-tokens", metavar="N", min=0, help="Longest answer compared exactly; 0: none."),
    ] = 32,
    json: Json = False,
) -> None:
    """Loss and exact match of a run's base model and adapter."""
    report = read_run(find_run_dir(run))

    from allranks.train.standalone_eval import EvalRequest, side_by_side

    stderr = _Stderr()
    try:
        found = side_by_side(
            EvalRequest(
                run_dir=report.run_dir,
                plan=report.plan,
                finished=report.state == "finished",
                step=report.step,
                data=data,
                split=split,
                max_samples=max_samples,
                max_answer_tokens=max_answer_tokens,
            ),
            say=stderr.say,
            progress=stderr.progress,
        )
    finally:
        stderr.clear()
    if json:
        typer.echo(as_json(_json(report, found, max_answer_tokens)))
    else:
        typer.echo("\n".join(_screen(report, found, max_answer_tokens)))


class _Stderr:
    """Lines for a person, and one live line below them where there is a terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def say(self, message: str) -> None:
        self.clear()
        print(f"allranks: {message}", file=sys.stderr, flush=True)

    def progress(self, message: str) -> None:
        if self._live:
            print(f"\r\x1b[K{message[: _WIDTH - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.progress("")


def _screen(report: RunReport, found: SideBySide, max_answer_tokens: int) -> list[str]:
    targets = "" if found.base.accuracy is not None else f", {found.targets:,} target tokens"
    lines = [
        f"{report.plan.name}: {found.samples:,} samples of {found.source}{targets}",
        f"adapter of step {found.step} · {found.device}, {_precision(found)} · {human_seconds(found.seconds)}",
    ]
    rows = [("", "BASE", "ADAPTER", "DIFFERENCE")]
    for name, before, after in _figures(found):
        if name == "loss":
            rows.append((name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"))
        else:
            rows.append((name, f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points"))
    words = []
    if found.answers is not None:
        words.append(
            f"exact match: greedy answers to the {found.answers:,} of {found.samples:,} samples "
            f"whose own answer has at most {max_answer_tokens} tokens"
        )
    return [
        *(part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")),
        "",
        *(line.rstrip() for line in table(rows, right=(1, 2, 3))),
        *(["", *textwrap.wrap(words[0], _WIDTH)] if words else []),
    ]


def _figures(found: SideBySide) -> list[tuple[str, float, float]]:
    """Name, base and adapter of each figure that there is."""
    base, adapter = asdict(found.base), asdict(found.adapter)
    return [(name.replace("_", " "), base[name], adapter[name]) for name in base if base[name] is not None]


def _precision(found: SideBySide) -> str:
    return "fp32" if found.precision == "no" else found.precision


def _json(report: RunReport, found: SideBySide, max_answer_tokens: int) -> dict[str, Any]:
    return {
        "run": report.plan.name,
        "run_dir": str(report.run_dir),
        "finished": report.state == "finished",
        **asdict(found),
        "precision": _precision(found),
        "difference": {name.replace(" ", "_"): after - before for name, before, after in _figures(found)},
        "max_answer_tokens": max_answer_tokens,
    }
