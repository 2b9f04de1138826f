"""Stands in for `allranks.train` under a real `accelerate launch`: no model, one behaviour by name.

Run as ``-m rank_stand_in --run-dir DIR BEHAVIOUR [ARGUMENT]``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from allranks.environment import rank_environment
from allranks.errors import ExitCode
from allranks.rank_process import follow_parent, redirect_output
from allranks.rundir import launch_log_path, stop_requested
from allranks.verdict import Reason, Verdict, write_verdict

HERE = rank_environment()
RUN_DIR = Path(sys.argv[2])
LONG_S = 120


def conclude(reason: Reason, exit_code: ExitCode, message: str = "as told") -> None:
    if HERE.rank == 0:
        write_verdict(RUN_DIR, Verdict(reason=reason, message=message, exit_code=exit_code, step=3))


def finish(_: str) -> None:
    print("ready")
    conclude("finished", ExitCode.OK)


def show(names: str) -> None:
    """Tell variables of the environment."""
    for name in names.split(","):
        print(f"{name}={os.environ.get(name)}")
    conclude("finished", ExitCode.OK)


def verdict(code: str) -> None:
    reasons: dict[ExitCode, Reason] = {
        ExitCode.CRASH: "failure",
        ExitCode.OUT_OF_MEMORY: "out_of_memory",
        ExitCode.DIVERGED: "not_finite",
        ExitCode.STORAGE: "storage",
    }
    conclude(reasons[ExitCode(int(code))], ExitCode(int(code)))


def no_verdict(_: str) -> None:
    print("leaving")


def heed(_: str) -> None:
    """Look for the stop request, as ranks do at a step boundary."""
    print("ready")
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if (reason := stop_requested(RUN_DIR)) is not None:
            print(f"saving because of {reason}")
            conclude("interrupted", ExitCode.INTERRUPTED, reason)
            return
        time.sleep(0.05)


def heed_sigint(_: str) -> None:
    """Leave on SIGINT, as ranks do at a step boundary."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    print("ready")
    deadline = time.monotonic() + LONG_S
    while not received and time.monotonic() < deadline:
        time.sleep(0.05)
    conclude("interrupted", ExitCode.INTERRUPTED, "SIGINT")


def deaf(_: str) -> None:
    """Never look for the stop request."""
    print("ready")
    time.sleep(LONG_S)


def stubborn(_: str) -> None:
    """Ignore every signal that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deaf("")


def last_rank(act: Callable[[], None]) -> None:
    print("ready")
    if HERE.rank == HERE.world_size - 1:
        time.sleep(0.5)
        act()
    time.sleep(LONG_S)


def killed(number: str) -> None:
    last_rank(lambda: os.kill(os.getpid(), int(number)))


def raising(_: str) -> None:
    def fail() -> None:
        raise ValueError("boom")

    last_rank(fail)


def exiting(status: str) -> None:
    last_rank(lambda: os._exit(int(status)))


def last_words(_: str) -> None:
    """What native code does when it aborts: unbuffered words on descriptor 2, then SIGABRT."""

    def abort() -> None:
        os.write(2, b"terminate called: last words")
        os.abort()

    last_rank(abort)


def talkative(count: str) -> None:
    for number in range(int(count)):
        print(f"line {number} {'x' * 100}", file=sys.stderr if number % 2 else sys.stdout)
    sys.stdout.write("unfinished")
    conclude("finished", ExitCode.OK)


def progress(_: str) -> None:
    for step in range(5):
        sys.stdout.write(f"step {step}/4\r")
        time.sleep(0.4)
    print("all steps done")
    conclude("finished", ExitCode.OK)


def with_orphan(_: str) -> None:
    """Leave a process behind that has a session of its own, a dead parent and no ear for SIGTERM."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('orphan', flush=True); "
        f"time.sleep({LONG_S})"
    )
    parent = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1]], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", parent, str(RUN_DIR)], check=True)
    log = launch_log_path(RUN_DIR, HERE.launch, HERE.rank)
    deadline = time.monotonic() + LONG_S
    while "orphan" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    conclude("finished", ExitCode.OK)


if __name__ == "__main__":
    redirect_output(launch_log_path(RUN_DIR, HERE.launch, HERE.rank))
    follow_parent(grace_s=3)
    behaviour, argument = [*sys.argv[3:], ""][:2]
    globals()[behaviour](argument)
