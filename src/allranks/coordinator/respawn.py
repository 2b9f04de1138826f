"""Whether all ranks may start again after a death: budgets by cause, and the ledger they are counted in. Pure but for
reading and writing the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.errors import ExitCode
from allranks.rundir import replace_text

LEDGER_FILE = "respawns.json"
LEDGER_VERSION = 1

_HOST_KINDS = (FailureKind.HOST_OOM, FailureKind.HOST_KILLED)
_DETERMINED = (FailureKind.ILLEGAL_ACCESS, FailureKind.DEVICE_ASSERT)


@dataclass(frozen=True, kw_only=True)
class Death:
    """Why a generation ended.

    Attributes:
        kind: what went wrong.
        message: what, who and where, in one clause.
        rank: whose failure it was; None if nobody knows.
        step: optimizer step that was being tried.
        phase: where in it.
        committed_step: last optimizer step that was made.
        cut: the caps were made smaller for it.
    """

    kind: FailureKind
    message: str
    rank: int | None
    step: int
    phase: str
    committed_step: int
    cut: bool = False

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Death:
        """Inverse of `dataclasses.asdict`, after a way through JSON."""
        return cls(**{**fields, "kind": FailureKind(fields["kind"])})

    @property
    def cause(self) -> str:
        """What its budget is counted under: ``memory``, ``host_memory``, or the kind itself."""
        if self.kind in _HOST_KINDS:
            return "host_memory"
        return "memory" if TRAITS[self.kind].memory else str(self.kind)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the ledger: a death, and what the restart after it counts.

    Attributes:
        death: why.
        weight: 1, or 2 after a generation that got no further than those before it.
    """

    death: Death
    weight: int


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The restarts of one launch.

    Attributes:
        launch: its number, from 1.
        starts: how often its ranks were started, this time included.
        entries: one per death.
    """

    launch: int
    starts: int = 1
    entries: tuple[Entry, ...] = ()

    @property
    def generation(self) -> int:
        """Of the ranks that run now, from 0."""
        return self.starts - 1

    def used(self, cause: str) -> int:
        """What the restarts for this cause have used of its budget."""
        return sum(entry.weight for entry in self.entries if entry.death.cause == cause)

    def after(self, death: Death) -> Ledger:
        """With one more death."""
        furthest = max((entry.death.committed_step for entry in self.entries), default=0)
        progress = not self.entries or death.cut or death.committed_step > furthest
        return replace(self, entries=(*self.entries, Entry(death=death, weight=1 if progress else 2)))


def started(run_dir: Path, launch: int) -> Ledger:
    """Count this start of the ranks of `launch` and return its ledger; for rank 0, once per start.

    Raises:
        OSError: the ledger can't be written.
    """
    ledger = read_ledger(run_dir)
    if ledger is None or ledger.launch != launch:
        ledger = Ledger(launch=launch, starts=0)
    ledger = replace(ledger, starts=ledger.starts + 1)
    write_ledger(run_dir, ledger)
    return ledger


def read_ledger(run_dir: Path) -> Ledger | None:
    """The ledger of the run's last launch; None where there is none, or one that another version wrote."""
    try:
        fields = json.loads((run_dir / LEDGER_FILE).read_text(encoding="utf-8"))
        if fields.pop("ledger_version") != LEDGER_VERSION:
            return None
        entries = tuple(
            Entry(death=Death.from_dict(entry["death"]), weight=entry["weight"]) for entry in fields.pop("entries")
        )
        return Ledger(**fields, entries=entries)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_ledger(run_dir: Path, ledger: Ledger) -> None:
    """Replace the ledger in one piece."""
    replace_text(
        run_dir / LEDGER_FILE, json.dumps({"ledger_version": LEDGER_VERSION, **asdict(ledger)}, indent=2) + "\n"
    )


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The budget is used up, or another try would end in the same way.

    Attributes:
        reason: short machine-readable cause.
        message: what to say.
        exit_code: what `allranks` returns for it.
    """

    reason: str
    message: str
    exit_code: ExitCode


def may_go_on(ledger: Ledger, *, max_respawns: int) -> GiveUp | None:
    """Judge the last death of the ledger; None: the ranks that have just started go on."""
    last = ledger.entries[-1].death
    before = ledger.entries[-2].death if len(ledger.entries) > 1 else None
    if before is not None and _again(before, last):
        return _give_up(last, f"it failed twice at the same step: {TRAITS[last.kind].advice}")
    used = ledger.used(last.cause)
    if used > max_respawns:
        times = sum(1 for entry in ledger.entries if entry.death.cause == last.cause)
        return _give_up(
            last,
            f"restart {times} for this cause would use {used} of oom.max_respawns = {max_respawns} (a restart that "
            f"got no further counts double; raise it to allow more): {TRAITS[last.kind].advice}",
        )
    return None


def _again(before: Death, last: Death) -> bool:
    """A fault that smaller micro-batches don't cure has come back at the same place."""
    same = (before.kind, before.step, before.phase) == (last.kind, last.step, last.phase)
    once = TRAITS[last.kind].severity is Severity.RETRY_ONCE or last.kind in _DETERMINED
    return same and once


def _give_up(death: Death, why: str) -> GiveUp:
    message = f"{death.message}; {why}"
    if TRAITS[death.kind].memory and death.kind not in _HOST_KINDS:
        return GiveUp(reason="out_of_memory", message=message, exit_code=ExitCode.OUT_OF_MEMORY)
    in_python = TRAITS[death.kind].severity < Severity.RESPAWN or TRAITS[death.kind].sticky
    return GiveUp(reason="failure", message=message, exit_code=ExitCode.CRASH if in_python else ExitCode.RANK_LOST)
