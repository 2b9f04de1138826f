"""From what a launch left behind to one exit code and one message. Pure but for reading logs."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.errors import ExitCode
from allranks.launch.command import TORCHRUN_DIR
from allranks.launch.logs import LAUNCHER_LOG, last_lines, rank_logs
from allranks.verdict import Verdict

_TAIL_LINES = 12
_OWN_STATUS = frozenset(ExitCode) - {ExitCode.OK, ExitCode.CRASH}
"""With these a rank leaves deliberately, after saying why; 1 is what Python returns for any exception."""

_TRACEBACK = b"Traceback (most recent call last)"
_SEARCHED_BYTES = 1024**2

# How torchrun and subprocess report the end of their children; accelerate itself returns 1 whatever happened.
_TORCHRUN_FAILURE = re.compile(
    r"^\s*time\s*:\s*(?P<time>\S+)\s*\n"
    r"(?:^\s*host\s*:.*\n)?"
    r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank: \d+\)\s*\n"
    r"^\s*exitcode\s*:\s*(?P<status>-?\d+) \(pid: \d+\)",
    re.MULTILINE,
)
_TORCHRUN_NOTICED = re.compile(r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: \d+\)")
_REPORT = re.compile(
    r"^[EW]\d{4} .* torch/distributed/elastic/"
    r"|^Traceback .*\n(?:  File \"<frozen .*\n)*  File \".*/commands/launch.py\"",
    re.MULTILINE,
)
_ONE_PROCESS_SIGNAL = re.compile(r"CalledProcessError: .* died with <Signals\.\w+: (\d+)>\.$", re.MULTILINE)
_ONE_PROCESS_STATUS = re.compile(r"CalledProcessError: .* returned non-zero exit status (\d+)\.$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank that ended with something else than 0.

    Attributes:
        rank: which.
        status: exit status; negative: the number of the signal that killed it.
    """

    rank: int
    status: int

    @property
    def by_signal(self) -> str | None:
        """Name of the signal that killed the rank, e.g. ``SIGKILL``."""
        if self.status >= 0:
            return None
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended.

    Attributes:
        exit_code: what `allranks run` returns.
        message: for a person, most important thing first.
        log: log file that explains it, if one does.
        tail: last lines of that log.
        stop_asked: somebody asked it to stop, which may have come too late.
    """

    exit_code: ExitCode
    message: str
    log: Path | None = None
    tail: tuple[str, ...] = ()
    stop_asked: bool = False


def first_death(launcher_log: str) -> Death | None:
    """The rank whose end brought the others down, from what accelerate and torchrun wrote; None if they don't say.

    torchrun names the rank that it saw dead first, and lists it last. Peers of a dead rank may fail in the same
    instant (their connection breaks), so of all that died in that very second a kill goes first, and a rank that
    left because it had lost a peer goes last.
    """
    if failures := list(_TORCHRUN_FAILURE.finditer(launcher_log)):
        root = failures[-1]
        deaths = [Death(rank=int(f["rank"]), status=int(f["status"])) for f in failures if f["time"] == root["time"]]
        return min(reversed(deaths), key=_secondary)
    deaths = reported_deaths(launcher_log)
    return deaths[-1] if deaths else one_process_death(launcher_log)


def reported_deaths(launcher_log: str) -> list[Death]:
    """The ranks whose end torchrun has noticed so far, oldest first, one for each time it started all again."""
    found = _TORCHRUN_NOTICED.finditer(launcher_log)
    return [Death(rank=int(noticed["rank"]), status=int(noticed["status"])) for noticed in found]


def one_process_death(launcher_log: str) -> Death | None:
    """How the only rank ended that accelerate had started without torchrun; None if it doesn't say."""
    if found := _ONE_PROCESS_SIGNAL.search(launcher_log):
        return Death(rank=0, status=-int(found[1]))
    if found := _ONE_PROCESS_STATUS.search(launcher_log):
        return Death(rank=0, status=int(found[1]))
    return None


def _secondary(death: Death) -> int:
    """How likely another death caused this one, from 0."""
    if death.status == -signal.SIGTERM:  # torchrun itself ends the others so
        return 3
    if death.status == ExitCode.RANK_LOST:
        return 2
    return 0 if death.status < 0 else 1


def agreed(verdict: Verdict) -> Outcome:
    """The outcome on which the ranks agreed."""
    return Outcome(exit_code=verdict.exit_code, message=f"{verdict.reason} at step {verdict.step}: {verdict.message}")


def forced(outcome: Outcome, status: int) -> Outcome:
    """`outcome` of ranks that left because accelerate was killed by a signal, -`status`, which nobody here sent."""
    name = Death(rank=0, status=status).by_signal
    return replace(outcome, message=f"accelerate launch was killed by {name}, its ranks left: {outcome.message}")


def killed_on_request(reason: str) -> Outcome:
    """The outcome of a stop that did not wait for the ranks."""
    return Outcome(
        exit_code=ExitCode.INTERRUPTED,
        message=f"killed after {reason}, before the ranks had saved; the last complete checkpoint is usable",
    )


def unexplained(status: int, log_dir: Path) -> Outcome:
    """The outcome of a launch that left no verdict.

    Args:
        status: exit status of accelerate; negative: the number of the signal that killed it.
        log_dir: folder of the launch's logs.
    """
    launcher_log = log_dir / LAUNCHER_LOG
    text = launcher_log.read_text(encoding="utf-8", errors="replace")
    if status < 0:
        name = Death(rank=0, status=status).by_signal
        return Outcome(
            exit_code=ExitCode.RANK_LOST, message=f"accelerate launch was killed by {name}, its ranks with it"
        )
    death = first_death(text)
    rank = 0 if death is None else death.rank
    log = rank_logs(log_dir).get(rank) or _early_log(log_dir, rank)
    if log is not None:
        tail = last_lines(log, _TAIL_LINES)
    else:
        log, tail = launcher_log, before_report(text)[-_TAIL_LINES:]
    exit_code, message = _cause(status, death, in_python=log == launcher_log or _has_traceback(log))
    return Outcome(exit_code=exit_code, message=message, log=log, tail=tuple(tail))


def _early_log(log_dir: Path, rank: int) -> Path | None:
    """What a rank said before it had its own log, if it said anything."""
    said = sorted((log_dir / TORCHRUN_DIR).glob(f"*/attempt_*/{rank}/stderr.log"))
    return next((path for path in reversed(said) if path.stat().st_size), None)


def _cause(status: int, death: Death | None, *, in_python: bool) -> tuple[ExitCode, str]:
    if status == 0:
        return ExitCode.CRASH, "all ranks left without an error and without a verdict: a fault of allranks"
    if death is None:
        return ExitCode.CRASH, f"accelerate launch failed with exit status {status}"
    if death.by_signal is not None:
        guess = ""
        if death.status == -signal.SIGKILL:
            guess = "; if nobody did that, the kernel did for want of host memory (see dmesg)"
        return ExitCode.RANK_LOST, f"rank {death.rank} was killed by {death.by_signal}{guess}"
    if death.status in _OWN_STATUS:
        return ExitCode(death.status), f"rank {death.rank} stopped with exit status {death.status}"
    if in_python:
        return ExitCode.CRASH, f"rank {death.rank} failed with exit status {death.status}"
    return ExitCode.RANK_LOST, f"rank {death.rank} left without a word, with exit status {death.status}"


def before_report(launcher_log: str) -> list[str]:
    """The non-empty lines that the ranks wrote before accelerate and torchrun reported their end."""
    report = _REPORT.search(launcher_log)
    text = launcher_log[: report.start()] if report else launcher_log
    return [line for line in text.splitlines() if line.strip()]


def _has_traceback(log: Path) -> bool:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _SEARCHED_BYTES))
        return _TRACEBACK in file.read()
