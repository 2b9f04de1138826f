"""Why a generation of ranks ended, from what it left behind: last words, exit statuses, progress pages, logs.

A rank that can still speak leaves last words before it leaves. Of one that can't (SIGKILL, the kernel's
out-of-memory killer, `exit(1)` in native code) there are its exit status, which the launcher noted, the page that
says where it was, and the end of its log.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.coordinator.failure import FAILURES_DIR, kind_of_words
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy_state import PolicyState
from allranks.coordinator.progress import Progress, read_pages
from allranks.coordinator.respawn import Death
from allranks.errors import RESPAWN_STATUS, ExitCode
from allranks.rundir import launch_log_path, replace_text
from allranks.units import plural

CAPS_FILE = "caps.json"

_TRACEBACK = "Traceback (most recent call last)"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""Torch puts it before each line of the traceback of an exception that nobody caught."""

LEFT_FOR_PEERS = "another rank died"
"""Why a rank left, on its page, that was sent SIGTERM: torchelastic does so when another one has died."""

_TAIL_BYTES = 256 * 1024
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_OF_PEERS = frozenset({int(ExitCode.RANK_LOST), RESPAWN_STATUS, -int(signal.SIGTERM)})
"""Statuses of ranks that left because another had died, or that have left last words."""


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """What a rank leaves that has failed where nothing can be retried in place.

    Attributes:
        death: why.
        state: what to go on with: the caps, made smaller if memory was the cause.
    """

    death: Death
    state: PolicyState


@dataclass(frozen=True, kw_only=True)
class ExitNote:
    """How one rank ended, as the launcher saw it.

    Attributes:
        rank: which.
        status: exit status; negative: the number of the signal that killed it.
        oom_kills: processes that the kernel killed meanwhile for want of host memory, where it tells.
    """

    rank: int
    status: int
    oom_kills: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of a death.

    Attributes:
        death: why the generation ended.
        state: the caps to go on with as the dead ranks left them; None if they left none.
    """

    death: Death
    state: PolicyState | None


def write_last_words(run_dir: Path, words: LastWords, *, launch: int, generation: int, rank: int) -> None:
    """Leave them for the next generation.

    Raises:
        OSError: the disk refuses.
    """
    fields = {"death": asdict(words.death), "state": words.state.to_json()}
    _write(run_dir, "words", launch, generation, rank, fields)


def write_exit_note(run_dir: Path, note: ExitNote, *, launch: int, generation: int) -> None:
    """Note how a rank ended; for the launcher.

    Raises:
        OSError: the disk refuses.
    """
    _write(run_dir, "exit", launch, generation, note.rank, asdict(note))


def write_caps(run_dir: Path, state: PolicyState, *, launch: int) -> None:
    """Keep the caps that the ranks have agreed on; rank 0 calls this at each change.

    Raises:
        OSError: the disk refuses.
    """
    replace_text(run_dir / CAPS_FILE, json.dumps({"launch": launch, "state": state.to_json()}) + "\n")


def read_caps(run_dir: Path, *, launch: int) -> PolicyState | None:
    """The caps that the ranks of this launch had agreed on; None if they are not known."""
    try:
        fields = json.loads((run_dir / CAPS_FILE).read_text(encoding="utf-8"))
        return PolicyState.from_json(fields["state"]) if fields["launch"] == launch else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(run_dir: Path, what: str, launch: int, generation: int, rank: int, fields: Mapping[str, Any]) -> None:
    folder = run_dir / FAILURES_DIR
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / f"{what}-L{launch:04d}-g{generation}-rank{rank}.json", json.dumps(fields) + "\n")


def _read(run_dir: Path, what: str, launch: int, generation: int) -> list[dict[str, Any]]:
    found = []
    for path in sorted((run_dir / FAILURES_DIR).glob(f"{what}-L{launch:04d}-g{generation}-rank*.json")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return found


def examine(run_dir: Path, *, launch: int, generation: int, known: PolicyState | None) -> Finding:
    """What ended `generation`.

    Args:
        run_dir: the run directory.
        launch: number of the launch.
        generation: the one that ended.
        known: the caps that its ranks had agreed on, if they are known.
    """
    words = [
        LastWords(
            death=Death.from_dict(fields["death"]),
            state=PolicyState.from_json(fields["state"]),
        )
        for fields in _read(run_dir, "words", launch, generation)
    ]
    if words:
        return _spoken(words)
    pages = read_pages(run_dir, launch=launch, generation=generation)
    notes = [ExitNote(**fields) for fields in _read(run_dir, "exit", launch, generation)]
    own = [note for note in notes if note.status not in _OF_PEERS]
    silent = [rank for rank, page in pages.items() if page.left is None]
    note = min(own, key=lambda each: (each.status >= 0, each.rank), default=None)
    rank = note.rank if note is not None else next(iter(silent), None)
    if rank is None and any(page.left == LEFT_FOR_PEERS for page in pages.values()) and notes:
        # Nobody had died: one rank alone was asked to end, which means just that to it.
        ended = pages.get(notes[0].rank)
        return _found(
            notes[0].rank, ended, FailureKind.KILLED, "was ended by SIGTERM, though no other rank had died,", known
        )
    if rank is None:
        committed = max((page.committed_step for page in pages.values()), default=0)
        message = "the ranks ended, and none of them left a sign of why"
        death = Death(
            kind=FailureKind.LOST, message=message, rank=None, step=committed + 1, phase="", committed_step=committed
        )
        return Finding(death=death, state=known)
    page = pages.get(rank)
    reborn = read_pages(run_dir, launch=launch, generation=generation + 1).get(rank)
    kind, how = _how(note, _own_log(run_dir, launch, rank, page, reborn))
    return _found(rank, page, kind, how, known)


def _spoken(words: Sequence[LastWords]) -> Finding:
    """The first cause among the last words of several ranks, and the smallest caps."""
    first = max(words, key=lambda each: (TRAITS[each.death.kind].severity, -(each.death.rank or 0)))
    state = first.state
    for each in words:
        state = state.within(each.state)
    return Finding(death=first.death, state=state)


def _how(note: ExitNote | None, log: str) -> tuple[FailureKind, str]:
    """Kind and words of an end, from exit status and log."""
    traceback = _TRACEBACK in log
    if note is None or note.status in (1, 0):
        if traceback:
            kind = kind_of_words(_raised(log))
            return kind if TRAITS[kind].memory else FailureKind.OTHER, f"failed: {_raised(log)}"
        if "out of memory" in log.lower():
            return FailureKind.NATIVE_OOM, f"was ended by native code for want of GPU memory ({_last_line(log)})"
        if note is None:
            return FailureKind.LOST, "ended without a word"
        return FailureKind.NATIVE_EXIT, f"was ended by native code with exit status {note.status}"
    if note.status > 0:
        return FailureKind.NATIVE_EXIT, f"ended with exit status {note.status}"
    name = _signal_name(-note.status)
    if -note.status in _CRASHES:
        return FailureKind.CRASHED, f"crashed in native code ({name})"
    if note.oom_kills:
        return FailureKind.HOST_KILLED, f"was killed by the kernel for want of host memory ({name})"
    return FailureKind.KILLED, f"was killed by {name}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _found(rank: int, page: Progress | None, kind: FailureKind, how: str, known: PolicyState | None) -> Finding:
    """The death of `rank`, with smaller caps if it ran out of GPU memory on a micro-batch that can be split."""
    if page is None:
        death = Death(
            kind=kind, message=f"rank {rank} {how} at its start", rank=rank, step=0, phase="start", committed_step=0
        )
        return Finding(death=death, state=known)
    where = f"in {page.phase}" if page.step <= page.committed_step else f"in step {page.step} ({page.phase})"
    message = f"rank {rank} {how} {where}"
    if page.samples:
        message += f" on a micro-batch of {plural(page.samples, 'sample')}, {plural(page.tokens, 'token')}"
    lighter = None
    if TRAITS[kind].memory and known is not None and page.phase in ("forward", "backward"):
        lighter = known.lighter(page.committed_step, samples=page.samples, tokens=page.tokens)
    death = Death(
        kind=kind,
        message=message,
        rank=rank,
        step=page.step,
        phase=page.phase,
        committed_step=page.committed_step,
        cut=lighter is not None,
    )
    return Finding(death=death, state=lighter or known)


def _own_log(run_dir: Path, launch: int, rank: int, page: Progress | None, reborn: Progress | None) -> str:
    """The end of what the dead process itself wrote; a log is appended to over restarts.

    Args:
        page: of the dead process.
        reborn: of the process that has its place now, which may have written too.
    """
    try:
        with launch_log_path(run_dir, launch, rank).open("rb") as file:
            end = file.seek(0, 2) if reborn is None else reborn.log_bytes
            begin = file.seek(max(0 if page is None else page.log_bytes, end - _TAIL_BYTES))
            return file.read(max(0, end - begin)).decode(errors="replace")
    except OSError:
        return ""


def _raised(log: str) -> str:
    """Class and text of the exception of the last traceback, as far as they stand in one line."""
    lines = _RANK_PREFIX.sub("", log).rpartition(_TRACEBACK)[2].splitlines()[1:]
    return next((line for line in lines if line.strip() and not line.startswith(" ")), "an exception")


def _last_line(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
