"""Runs as a person reads them on a terminal. Pure: reports and a width in, lines out."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from allranks.caps import Caps
from allranks.report.runs import Event, RunReport
from allranks.units import human_bytes, human_seconds, plural

_MOST_ROWS = 12
_GAP = "  "
_LONGEST_MESSAGE = 300


def runs_table(reports: Sequence[RunReport], width: int) -> list[str]:
    """One line per run; a name that is too long for `width` columns is cut."""
    head = ("NAME", "PROFILE", "RANKS", "STEPS", "LOSS", "STATE", "WHEN")
    rows = [
        (
            report.plan.name,
            report.plan.profile_kind,
            str(report.plan.world_size),
            _steps(report),
            "-" if report.loss is None else f"{report.loss:.4f}",
            _words(report.state),
            _when(report.updated),
        )
        for report in reports
    ]
    others = table([row[1:] for row in (head, *rows)], right=(1, 2, 3))
    room = max(8, width - len(others[0]) - len(_GAP))
    names = [_cut(row[0], room) for row in (head, *rows)]
    longest = max(map(len, names))
    return [f"{name:<{longest}}{_GAP}{rest}".rstrip() for name, rest in zip(names, others, strict=True)]


def run_screen(report: RunReport, width: int) -> list[str]:
    """All of one run, in sections; those without content are left out."""
    plan = report.plan
    ranks = f"{plan.world_size} {plan.device} rank{'s' if plan.world_size > 1 else ''}"
    launches = f"{report.launches} launch{'es' if report.launches != 1 else ''}"
    compute = "fp32" if plan.mixed_precision == "no" else plan.mixed_precision
    facts = [
        ("state", f"{_STATE_WORDS.get(report.state, report.state)}, {_when(report.updated)}"),
        ("folder", str(report.run_dir)),
        ("profile", f"{plan.profile_kind} on {ranks} · {compute} · global batch {plan.global_batch_size} · {launches}"),
        ("model", f"{plan.config.model.name_or_path}{_parameters(report.model)}"),
        ("data", f"{plan.config.data.train}{_samples(report.data)}"),
        ("steps", _steps(report)),
    ]
    sections = {
        "notes": [line for note in report.notes for line in _wrapped(note, width)],
        f"training{_shown(report.logs)}": _indented(_log_table(report.logs)),
        f"evaluation{_shown(report.evaluations)}": _indented(_eval_table(report.evaluations)),
        "incidents": [line for event in report.incidents for line in _wrapped(_incident(event), width)],
        "checkpoints": [
            f"  step {save['step']}  {save['path']}  {human_bytes(save['bytes'])}"
            + (f", written in {human_seconds(save['seconds'])}" if save["seconds"] is not None else "")
            for save in report.saves
        ],
        "verdict": [] if report.verdict is None else _wrapped(_verdict(report), width),
    }
    lines = [plan.name, *(line for name, text in facts for line in _wrapped(f"{name:<8}{text}", width, hang=8))]
    for title, content in sections.items():
        if content:
            lines += ["", title, *content]
    return lines


def table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows in columns as wide as their widest cell; the columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        _GAP.join(
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def caps_words(caps: Sequence[int | None]) -> str:
    """Caps of a micro-batch, as events carry them."""
    samples, tokens = caps
    assert samples is not None
    return Caps(max_samples=samples, max_tokens=tokens).words()


def _log_table(logs: Sequence[Event]) -> list[str]:
    if not logs:
        return []
    head = ("STEP", "LOSS", "GRAD NORM", "LR", "TOKENS/S", "PEAK PER RANK")
    rows = [
        (
            str(log["step"]),
            f"{log['loss']:.4f}",
            f"{log['grad_norm']:.3g}",
            f"{log['learning_rate']:.2e}",
            f"{log['tokens_per_s']:,.0f}",
            human_bytes(max(log["peak_bytes"])),
        )
        for log in _thinned(logs)
    ]
    return table([head, *rows], right=range(len(head)))


def _eval_table(evaluations: Sequence[Event]) -> list[str]:
    if not evaluations:
        return []
    head = ("STEP", "LOSS", "SAMPLES", "TIME")
    rows = [
        (str(e["step"]), f"{e['loss']:.4f}", str(e["samples"]), human_seconds(e["seconds"]))
        for e in _thinned(evaluations)
    ]
    return table([head, *rows], right=range(len(head)))


def _thinned(events: Sequence[Event]) -> list[Event]:
    """At most 12 of them, evenly spread, the first and the last among them."""
    if len(events) <= _MOST_ROWS:
        return list(events)
    step = (len(events) - 1) / (_MOST_ROWS - 1)
    return [events[round(row * step)] for row in range(_MOST_ROWS)]


def _shown(events: Sequence[Event]) -> str:
    return f" ({_MOST_ROWS} of {len(events)} rows)" if len(events) > _MOST_ROWS else ""


def _incident(event: Event) -> str:
    match event["kind"]:
        case "failure":
            what = f"rank {event['rank']} failed in {event['phase']} ({event['failure']}): {_first_line(event)}"
        case "retry":
            what = f"all ranks took it again with {caps_words(event['caps'])}{_left_out(event)}"
        case "respawn":
            where = f"step {event['resumed_step']}"
            what = f"{_first_line(event)}; all ranks were started again and went on from {where}"
        case "caps":
            what = f"from here on {caps_words(event['caps'])} ({_REASON_WORDS[event['reason']]})"
        case "skipped_step":
            what = f"no update: {event['reason']}"
        case _:
            what = f"launch {event['launch']} went on from {event['checkpoint']}"
    return f"step {event['step']}: {what}"


def _left_out(event: Event) -> str:
    ids = event["skipped_samples"]
    return f", without {plural(len(ids), 'sample')} that did not fit ({', '.join(map(str, ids))})" if ids else ""


def _first_line(event: Event) -> str:
    return _cut(event["message"].partition("\n")[0], _LONGEST_MESSAGE)


def _verdict(report: RunReport) -> str:
    verdict = report.verdict
    assert verdict is not None
    return f"{_words(verdict.reason)} at step {verdict.step} (exit code {int(verdict.exit_code)}): {verdict.message}"


def _parameters(model: Event | None) -> str:
    if model is None:
        return ""
    trained = f"{model['trainable'] / 1e6:.2f} of {model['parameters'] / 1e6:.1f} million parameters trained"
    attention = ""
    if "attention" in model:  # not in runs of earlier versions
        attention = f" · attention {model['attention']}, {'no padding' if model['padding_free'] else 'padded'}"
        attention += f" · loss by {model['loss']}"
    return f" · {trained} · base {human_bytes(model['base_bytes'])}{attention}"


def _samples(data: Event | None) -> str:
    if data is None:
        return ""
    return (
        f" · {data['samples']} samples, {data['eval_samples']} for evaluation · at most {data['max_length']} tokens, "
        f"{data['truncated']} truncated · {data['skipped']} skipped"
    )


def _steps(report: RunReport) -> str:
    return f"{report.step}/{'?' if report.total_steps is None else report.total_steps}"


_REASON_WORDS = {"pressure": "the GPU memory was nearly full", "headroom": "every GPU had room"}

_STATE_WORDS = {
    "planned": "planned, never started",
    "died": "ended without a verdict",
    "not_finite": "stopped: the loss was not finite",
    "out_of_memory": "stopped: out of memory",
    "storage": "stopped: a checkpoint could not be written or read",
    "failure": "failed",
    "interrupted": "stopped on request",
}


def _words(state: str) -> str:
    return state.replace("_", " ")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _wrapped(text: str, width: int, hang: int = 2) -> list[str]:
    """`text` below a title, each of its lines wrapped to `width` with a hanging indent."""
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(
            line,
            width,
            initial_indent="  ",
            subsequent_indent=" " * (2 + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def as_json(value: Any) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2)
