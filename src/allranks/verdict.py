"""How a run ended: written by rank 0 when all ranks agreed to leave, and by the launcher where they could not; read by
the launcher and the reports.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from allranks.errors import ExitCode
from allranks.rundir import replace_text

VERDICT_FILE = "verdict.json"
VERDICT_VERSION = 1
_RESERVE_FILE = ".verdict-reserve"
_RESERVE_BYTES = 16 * 1024

Reason = Literal["finished", "interrupted", "out_of_memory", "not_finite", "storage", "failure"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a launch.

    Attributes:
        reason: short machine-readable cause.
        message: what a person should read, one or a few lines.
        exit_code: what `allranks run` returns for it.
        step: last committed optimizer step.
    """

    reason: Reason
    message: str
    exit_code: ExitCode
    step: int


_REASONS: dict[ExitCode, Reason] = {
    ExitCode.OK: "finished",
    ExitCode.OUT_OF_MEMORY: "out_of_memory",
    ExitCode.DIVERGED: "not_finite",
    ExitCode.STORAGE: "storage",
    ExitCode.INTERRUPTED: "interrupted",
}


def reason_of(code: ExitCode) -> Reason:
    """The reason for which a launch returns `code`."""
    return _REASONS.get(code, "failure")


def write_verdict(run_dir: Path, verdict: Verdict) -> None:
    """Replace the run's verdict in one piece; on a full disk, in the room that `prepare_verdict` took.

    Raises:
        OSError: the disk refuses.
    """
    reserve = run_dir / _RESERVE_FILE
    try:
        replace_text(run_dir / VERDICT_FILE, _text(verdict))
        reserve.unlink(missing_ok=True)
    except OSError:
        if not reserve.exists():
            raise
        text = _text(verdict).encode()
        if len(text) > _RESERVE_BYTES:
            text = _text(replace(verdict, message=f"{verdict.message[: _RESERVE_BYTES // 8]}…")).encode()
        with reserve.open("r+b") as file:
            file.write(text)
            file.truncate()
        reserve.replace(run_dir / VERDICT_FILE)


def _text(verdict: Verdict) -> str:
    fields = {"verdict_version": VERDICT_VERSION, **asdict(verdict), "exit_code": int(verdict.exit_code)}
    return json.dumps(fields, indent=2) + "\n"


def read_verdict(run_dir: Path) -> Verdict | None:
    """The run's verdict; None if it has none.

    Raises:
        ValueError: the file is not what `write_verdict` of this version writes.
    """
    path = run_dir / VERDICT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        version = fields.pop("verdict_version", None)
        if version != VERDICT_VERSION:
            raise ValueError(f"verdict version {version!r} is not {VERDICT_VERSION}: written by another allranks")
        verdict = Verdict(**{**fields, "exit_code": ExitCode(fields["exit_code"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if verdict.reason not in get_args(Reason):
        raise ValueError(f"{path}: reason {verdict.reason!r} is none of {', '.join(get_args(Reason))}")
    return verdict


def prepare_verdict(run_dir: Path) -> None:
    """Remove the verdict of an earlier launch, so that it can't be taken for the next one's, and make room for that.

    Raises:
        OSError: the disk refuses.
    """
    (run_dir / VERDICT_FILE).unlink(missing_ok=True)
    (run_dir / _RESERVE_FILE).write_bytes(bytes(_RESERVE_BYTES))
