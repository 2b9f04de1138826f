"""Errors that a user can act on, and the exit codes of the `allranks` command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What the `allranks` command returns to the shell."""

    OK = 0
    CRASH = 1
    """A fault in allranks or in a library beneath it; the traceback is in the rank logs."""
    USAGE = 2
    """Bad configuration, command line or data; nothing was started or nothing was lost."""
    OUT_OF_MEMORY = 3
    """All ranks agreed that not even one sample fits; the last checkpoint is usable."""
    DIVERGED = 4
    """Loss or gradient norm was not finite."""
    RANK_LOST = 5
    """A rank died without a word (SIGKILL, exit in native code)."""
    STORAGE = 6
    """A checkpoint could not be written (disk full, permissions); the previous one is usable."""
    INTERRUPTED = 75
    """Stopped on request (SIGTERM, SIGINT); after saving, unless it was killed, which the message then says."""


RESPAWN_STATUS = 76
"""What a rank returns to torchelastic to be started again with the others; `allranks` never returns it."""


class AllranksError(Exception):
    """Base of every error that is shown to the user without a traceback."""

    exit_code: ExitCode = ExitCode.USAGE


class UserError(AllranksError):
    """Something the user gave is wrong. The message names the value, the valid choices and the fix."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault in what the user gave.

    Attributes:
        path: dotted path of the key, e.g. ``training.learning_rate``; or a file with a line.
        message: what is wrong, with the value in it.
        choices: the valid choices, if they can be listed.
        nearest: the valid key or value nearest to what was written, if one is near.
        fix: what to do about it, in the imperative.
    """

    path: str
    message: str
    choices: tuple[str, ...] = ()
    nearest: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.message}"]
        if self.nearest is not None:
            lines.append(f"    nearest: {self.nearest}")
        if self.choices:
            lines.append(f"    valid: {', '.join(self.choices)}")
        if self.fix is not None:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


class ProblemsError(UserError):
    """Several problems, reported together.

    Attributes:
        problems: at least one, in the order of the file.
    """

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__("\n".join([f"{source}: {count}", *(f"  {p}".replace("\n", "\n  ") for p in problems)]))


class StopTraining(AllranksError):
    """A deliberate stop on which all ranks agreed; becomes the run's verdict.

    Attributes:
        exit_code: what `allranks` returns for it.
        reason: short machine-readable cause, e.g. ``out_of_memory``.
    """

    def __init__(self, reason: str, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.reason = reason
        self.exit_code = exit_code
