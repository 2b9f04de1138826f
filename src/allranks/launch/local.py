"""Starts one launch on this machine, shows what its ranks say, stops it on request, and leaves no process behind.

The only module that starts processes. It has no threads: one loop reads the logs and looks after the processes.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from allranks import environment
from allranks.checkpoints.durable import StorageError, free_bytes
from allranks.errors import ExitCode
from allranks.events import read_events
from allranks.launch.command import LaunchRequest
from allranks.launch.logs import LAUNCHER_LOG, Console, RankLogs
from allranks.launch.outcome import Outcome, agreed, forced, killed_on_request, unexplained
from allranks.launch.processes import Tree, adopting_orphans, end_with_parent
from allranks.launch.restarts import DeathWatch
from allranks.lineage import last_step
from allranks.rundir import discard_stop_request, request_stop, unwritable
from allranks.units import human_bytes, human_seconds
from allranks.verdict import Verdict, prepare_verdict, read_verdict, reason_of, write_verdict

GRACE_S = 120.0
"""Default time for the ranks to finish their step, save and leave."""

_FULL_DISK_BYTES = 64 * 1024
"""With less, not even logs can be written, and nobody is left to say so."""

_POLL_S = 0.2
_SAME_WISH_S = 0.5
_PATIENCE_S = 10.0


def run(
    request: LaunchRequest, run_dir: Path, *, world_size: int, console: Console, grace_s: float = GRACE_S
) -> Outcome:
    """Start the launch and stay with it until the last of its processes is gone.

    The caller holds the run directory (`rundir.launch_lock`), and the plan lies in it.

    Args:
        request: what to start.
        run_dir: the run directory.
        world_size: ranks on this machine.
        console: where the ranks' lines go.
        grace_s: time from a stop request until the ranks get SIGTERM, in seconds.

    Returns:
        How it ended. With a verdict the ranks agreed on it, whatever the exit status of accelerate.

    Raises:
        UserError: the run directory can't be written; nothing was started.
        StorageError: it was removed meanwhile; all ranks were ended.
    """
    try:
        prepare_verdict(run_dir)
        discard_stop_request(run_dir)
        request.log_dir.mkdir(parents=True, exist_ok=True)
        (request.log_dir / LAUNCHER_LOG).touch()
    except OSError as error:
        raise unwritable(str(error.filename or run_dir), error) from error
    logs = RankLogs(request.log_dir, world_size, console)
    with adopting_orphans(), _stop_signals() as signals:
        tree = Tree()
        try:
            deaths = DeathWatch(run_dir, request.log_dir, request.launch, console)
            watched = deaths if request.restarts else None
            stop = _Stop(run_dir, signals, console, tree, grace_s)
            while True:
                process = _start(request)
                tree.grow_from(process)
                killed = _attend(process, request.log_dir, stop, logs, None if request.one_process else watched)
                _end_stragglers(tree, logs, signals)
                again = request.one_process and request.restarts and killed is None and not signals.names
                if not again or process.returncode == 0 or read_verdict(run_dir) is not None:
                    break
                deaths.ended()
                if deaths.in_vain:
                    break
        finally:
            for pid in tree.end():
                console.line(f"allranks: process {pid} does not end even on SIGKILL; it hangs in the kernel")
            logs.finish()
    outcome = _outcome(run_dir, request, process.returncode, killed, deaths)
    return replace(outcome, stop_asked=bool(signals.names))


def _start(request: LaunchRequest) -> subprocess.Popen[bytes]:
    # A file and no pipe: nobody can block on it, and what a dying process writes is there whoever still reads.
    with (request.log_dir / LAUNCHER_LOG).open("ab") as log:
        return subprocess.Popen(
            request.argv,
            env=request.environment(environment.inherited()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )


class _StopSignals:
    """Names of the stop signals that arrived, oldest first.

    One stop often comes as two signals: `timeout` and shells send theirs to the process and to its group, and a
    terminal that closes does so too. What follows within half a second is the same wish and no second one.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._last = -math.inf

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _SAME_WISH_S:
            self.names.append(signal.Signals(number).name)
        self._last = now


@contextmanager
def stops_go_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` called on SIGINT, SIGTERM and SIGHUP, and who was called before again afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored stays so: nohup does that with SIGHUP, a shell with SIGINT for jobs in the background.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def _stop_signals() -> Iterator[_StopSignals]:
    received = _StopSignals()
    with stops_go_to(received):
        yield received


class _Stop:
    """From the first stop signal to the last resort: ask, wait, SIGTERM, SIGKILL."""

    def __init__(self, run_dir: Path, signals: _StopSignals, console: Console, tree: Tree, grace_s: float) -> None:
        self._run_dir = run_dir
        self._signals = signals
        self._console = console
        self._tree = tree
        self._grace_s = grace_s
        self._deadline: float | None = None

    def ask(self) -> None:
        """After the first signal, ask the ranks once to save and leave."""
        if self._deadline is not None or not self._signals.names:
            return
        name = self._signals.names[0]
        self._deadline = time.monotonic() + self._grace_s
        self._console.alert(
            f"allranks: {name}: the ranks save at the next step boundary and leave, within "
            f"{human_seconds(self._grace_s)}; a second Ctrl-C kills them at once"
        )
        try:
            request_stop(self._run_dir, name)
        except OSError as error:  # a full disk, for one
            self._console.alert(f"allranks: the stop request can't be written ({error}): the ranks get SIGINT instead")
            self._tree.signal_ranks(signal.SIGINT)

    def force(self, logs: RankLogs) -> str | None:
        """Kill everything on a second signal or after the grace, and say why; None while there is patience."""
        if len(self._signals.names) > 1:
            why = f"a second signal ({self._signals.names[1]})"
            self._console.alert(f"allranks: {why}: killing all ranks now")
        elif self._deadline is not None and time.monotonic() > self._deadline:
            why = f"{self._signals.names[0]} and {human_seconds(self._grace_s)} of grace"
            self._console.alert("allranks: the grace is over: ending all ranks")
            self._tree.ask(signal.SIGTERM, _PATIENCE_S, partial(_out_of_patience, logs, self._signals, 2))
        else:
            return None
        self._tree.end()
        return why


def _attend(
    process: subprocess.Popen[bytes], log_dir: Path, stop: _Stop, logs: RankLogs, deaths: DeathWatch | None
) -> str | None:
    """Stay until accelerate is gone; the reason if it was we who killed it on request."""
    while process.poll() is None:
        _require(log_dir)
        logs.pump()
        if deaths is not None:
            deaths.look()
            if deaths.in_vain:
                process.kill()
        stop.ask()
        if (why := stop.force(logs)) is not None:
            return why
        time.sleep(_POLL_S)  # logs, processes and signals: no one thing to wait for tells of all three
    return None


def _require(log_dir: Path) -> None:
    try:
        log_dir.stat()
    except FileNotFoundError:
        raise StorageError(
            f"{log_dir} was removed while the run went on: all ranks were ended\n"
            "    fix: let the run end before its directory goes; Ctrl-C ends it, and what it has saved can be resumed"
        ) from None
    except OSError:
        pass  # what a network file system answers while its server is away says nothing of the folder


def _end_stragglers(tree: Tree, logs: RankLogs, signals: _StopSignals) -> None:
    """End ranks that outlived accelerate (somebody killed it), and helper processes that a library left."""
    tree.ask(signal.SIGTERM, _PATIENCE_S, partial(_out_of_patience, logs, signals, len(signals.names) + 1))


def _out_of_patience(logs: RankLogs, signals: _StopSignals, limit: int) -> bool:
    logs.pump()
    return len(signals.names) >= limit


def _outcome(run_dir: Path, request: LaunchRequest, status: int, killed: str | None, deaths: DeathWatch) -> Outcome:
    """The verdict on which the ranks agreed; without one what happened to them, which is then the verdict."""
    try:
        verdict = read_verdict(run_dir)
    except ValueError as error:
        return Outcome(exit_code=ExitCode.CRASH, message=str(error))
    if verdict is not None:
        return agreed(verdict) if status >= 0 or killed is not None else forced(agreed(verdict), status)
    outcome = killed_on_request(killed) if killed is not None else _found_out(run_dir, request, status, deaths)
    verdict = Verdict(
        reason=reason_of(outcome.exit_code),
        message=outcome.message,
        exit_code=outcome.exit_code,
        step=last_step(read_events(run_dir)),
    )
    with suppress(OSError):  # it is said on the screen
        write_verdict(run_dir, verdict)
    return outcome


def _found_out(run_dir: Path, request: LaunchRequest, status: int, deaths: DeathWatch) -> Outcome:
    """What ended ranks that have agreed on nothing."""
    in_vain = request.restarts and deaths.in_vain
    outcome = unexplained(int(ExitCode.CRASH) if in_vain else status, request.log_dir)
    if in_vain:
        fix = "\n    fix: run the same command again" if outcome.exit_code is ExitCode.RANK_LOST else ""
        word = "before all had joined, so none was started again"
        outcome = replace(outcome, message=f"{outcome.message}; {word}{fix}")
    if not request.restarts:
        outcome = deaths.explained(outcome)
    free = free_bytes(run_dir)
    if outcome.exit_code is ExitCode.CRASH and free is not None and free < _FULL_DISK_BYTES:
        word = f"the disk of {run_dir} is full ({human_bytes(free)} free)\n    fix: make room, then run this again"
        return replace(outcome, exit_code=ExitCode.STORAGE, message=f"{outcome.message}; {word}")
    return outcome
