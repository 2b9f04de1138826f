"""Real launches: `accelerate launch` starts stand-in ranks (rank_stand_in.py), signals and kills hit real processes."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from allranks.errors import ExitCode, UserError
from allranks.rundir import is_held, launch_lock

HERE = Path(__file__).resolve().parent
FAR_S = 60.0
"""Deadline of a wait that takes a second or a few; passing it is the failure."""


class Launch:
    """One running driver; its output is read from a file, so that waiting for a line can't block."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, output: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._output = output

    @property
    def lines(self) -> list[str]:
        return self._output.read_text().splitlines()

    def wait_for(self, *lines: str) -> None:
        until(lambda: set(lines) <= set(self.lines), f"{lines} in {self.lines}")

    def wait(self) -> int:
        return self.process.wait(timeout=FAR_S)

    def below(self) -> list[psutil.Process]:
        """All processes of this launch but the driver: each has the run directory in its command line."""
        return [p for p in of_run(self.run_dir) if p.pid != self.process.pid]

    def accelerate(self) -> psutil.Process:
        return next(p for p in self.below() if "accelerate.commands.launch" in p.cmdline())

    def rank(self, rank: int) -> psutil.Process:
        return next(p for p in self.below() if p.environ().get("RANK") == str(rank))


def until(condition: Callable[[], bool], what: str, deadline_s: float = FAR_S) -> float:
    """Wait for `condition` and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - start


def of_run(run_dir: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(run_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    yield folder
    left = of_run(folder)
    for process in left:
        process.kill()
    assert not left, "processes were left behind"


@contextmanager
def launch(
    run_dir: Path,
    *behaviour: str,
    kind: str = "ddp",
    grace_s: float = 60,
    stdout: int | None = None,
    modules: Path = HERE,
) -> Iterator[Launch]:
    output = run_dir.with_name("output.txt")
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "drive_launch.py"), str(run_dir), kind, str(grace_s), *behaviour],
            stdout=file if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(modules)},
        )
    try:
        yield Launch(process, run_dir, output)
    finally:
        process.kill()
        process.wait()


# --- starting --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("single", "ACCELERATE_USE_CPU", "False"),
        ("ddp", "ACCELERATE_USE_CPU", "None"),
        ("zero2", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"),
        ("zero3", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
        ("fsdp", "FSDP_VERSION", "2"),
    ],
)
def test_every_profile_starts_its_ranks(kind: str, name: str, value: str, run_dir: Path) -> None:
    shown = f"WORLD_SIZE,OMP_NUM_THREADS,CUDA_VISIBLE_DEVICES,ACCELERATE_MIXED_PRECISION,{name}"
    with launch(run_dir, "show", shown, kind=kind) as started:
        assert started.wait() == ExitCode.OK
    world_size = "None" if kind == "single" else "2"
    told = [f"WORLD_SIZE={world_size}", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", "ACCELERATE_MIXED_PRECISION=bf16"]
    for rank in range(1 if kind == "single" else 2):
        assert [line for line in started.lines if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {line}" for line in [*told, f"{name}={value}"]
        ]
    assert started.lines[-1] == "outcome: finished at step 3: as told"


@pytest.mark.timeout(120)
def test_two_launches_at_once_do_not_meet(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run"
    other.parent.mkdir()
    with launch(run_dir, "show", "MASTER_PORT") as one, launch(other, "show", "MASTER_PORT") as two:
        assert (one.wait(), two.wait()) == (ExitCode.OK, ExitCode.OK)
    ports = [{line for line in started.lines if "MASTER_PORT" in line} for started in (one, two)]
    assert len(ports[0]) == len(ports[1]) == 2
    assert not ports[0] & ports[1]


# --- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("single", ExitCode.CRASH),
        ("ddp", ExitCode.OUT_OF_MEMORY),
        ("single", ExitCode.DIVERGED),
        ("ddp", ExitCode.STORAGE),
    ],
)
def test_the_verdict_becomes_the_exit_code(kind: str, code: ExitCode, run_dir: Path) -> None:
    with launch(run_dir, "verdict", str(int(code)), kind=kind) as started:
        assert started.wait() == code


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_run_directory_that_is_removed_ends_the_launch_with_a_word(kind: str, run_dir: Path) -> None:
    with launch(run_dir, "deaf", kind=kind) as started:
        started.wait_for("[rank 0] ready")
        shutil.rmtree(run_dir)
        assert started.wait() == ExitCode.STORAGE
    log_dir = run_dir / "logs" / "launch-0001"
    assert f"error: {log_dir} was removed while the run went on: all ranks were ended" in started.lines
    assert not started.below()


@pytest.mark.timeout(120)
def test_a_verdict_of_an_earlier_launch_does_not_count(run_dir: Path) -> None:
    with launch(run_dir, "finish") as first:
        assert first.wait() == ExitCode.OK
    with launch(run_dir, "no_verdict") as second:
        assert second.wait() == ExitCode.CRASH
    assert second.lines[-1] == "outcome: all ranks left without an error and without a verdict: a fault of allranks"
    assert (run_dir / "logs" / "launch-0001" / "rank1.log").read_text() == "ready\n"
    assert (run_dir / "logs" / "launch-0002" / "rank1.log").read_text() == "leaving\n"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "behaviour", "code", "message"),
    [
        ("single", ("raising",), ExitCode.CRASH, "failed with exit status 1"),
        ("ddp", ("raising",), ExitCode.CRASH, "failed with exit status 1"),
        ("ddp", ("exiting", "7"), ExitCode.RANK_LOST, "left without a word, with exit status 7"),
        ("single", ("killed", "11"), ExitCode.RANK_LOST, "was killed by SIGSEGV"),
    ],
)
def test_a_failing_rank_ends_the_launch(
    kind: str, behaviour: tuple[str, ...], code: ExitCode, message: str, run_dir: Path
) -> None:
    with launch(run_dir, *behaviour, kind=kind) as started:
        assert started.wait() == code
    assert started.lines[-1] == f"outcome: rank {0 if kind == 'single' else 1} {message}"
    if behaviour == ("raising",):
        assert started.lines[-2] == "tail: ValueError: boom"


@pytest.mark.timeout(90)
def test_the_last_words_of_native_code_are_in_the_log(run_dir: Path) -> None:
    with launch(run_dir, "last_words") as started:
        assert started.wait() == ExitCode.RANK_LOST
    assert "[rank 1] terminate called: last words" in started.lines
    assert started.lines[-2:] == ["tail: terminate called: last words", "outcome: rank 1 was killed by SIGABRT"]


@pytest.mark.timeout(90)
def test_a_rank_that_cannot_start_is_explained(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "rank_stand_in.py").write_text("import no_such_module_anywhere\n")
    with launch(run_dir, "finish", modules=tmp_path) as started:
        assert started.wait() == ExitCode.CRASH
    assert started.lines[-2] == "tail: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert re.fullmatch(r"outcome: rank [01] failed with exit status 1", started.lines[-1])


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "number"),
    [("single", signal.SIGTERM), ("ddp", signal.SIGINT), ("ddp", signal.SIGTERM), ("single", signal.SIGHUP)],
)
def test_a_stop_signal_asks_the_ranks(kind: str, number: signal.Signals, run_dir: Path) -> None:
    with launch(run_dir, "heed", kind=kind) as started:
        ranks = range(1 if kind == "single" else 2)
        started.wait_for(*(f"[rank {rank}] ready" for rank in ranks))
        started.process.send_signal(number)
        assert started.wait() == ExitCode.INTERRUPTED
        assert not of_run(run_dir)
    for rank in ranks:
        assert f"[rank {rank}] saving because of {number.name}" in started.lines
    assert (
        f"allranks: {number.name}: the ranks save at the next step boundary and leave, within 1 min 00 s; "
        "a second Ctrl-C kills them at once"
    ) in started.lines
    assert started.lines[-1] == f"outcome: interrupted at step 3: {number.name}"


@pytest.mark.timeout(90)
def test_one_stop_that_comes_as_two_signals_is_one(run_dir: Path) -> None:
    with launch(run_dir, "heed") as started:
        started.wait_for("[rank 0] ready", "[rank 1] ready")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            started.process.send_signal(number)
            time.sleep(0.05)
        assert started.wait() == ExitCode.INTERRUPTED
    assert "[rank 1] saving because of SIGTERM" in started.lines


@pytest.mark.timeout(90)
def test_a_stop_request_that_cannot_be_written_becomes_a_signal(run_dir: Path) -> None:
    with launch(run_dir, "heed_sigint") as started:
        started.wait_for("[rank 0] ready", "[rank 1] ready")
        (run_dir / f".stop.request.{started.process.pid}").mkdir()  # where its content would be written first
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == ExitCode.INTERRUPTED
    assert any(line.endswith("the ranks get SIGINT instead") for line in started.lines)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_second_signal_kills_at_once(kind: str, run_dir: Path) -> None:
    with launch(run_dir, "stubborn", kind=kind) as started:
        started.wait_for("[rank 0] ready")
        started.process.send_signal(signal.SIGINT)
        until(lambda: any("a second Ctrl-C" in line for line in started.lines), "the first signal is answered")
        time.sleep(0.6)  # what comes at once is taken for the same wish
        started.process.send_signal(signal.SIGINT)
        assert until(lambda: started.process.poll() is not None, "the launcher leaves") < 5
        assert not of_run(run_dir)
        assert started.process.returncode == ExitCode.INTERRUPTED
    assert started.lines[-1] == (
        "outcome: killed after a second signal (SIGINT), before the ranks had saved; "
        "the last complete checkpoint is usable"
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("behaviour", "limit_s"), [("deaf", 8.0), ("stubborn", 20.0)])
def test_after_the_grace_the_ranks_are_ended(behaviour: str, limit_s: float, run_dir: Path) -> None:
    with launch(run_dir, behaviour, grace_s=1) as started:
        started.wait_for("[rank 0] ready", "[rank 1] ready")
        started.process.send_signal(signal.SIGTERM)
        assert until(lambda: started.process.poll() is not None, "the launcher leaves") < limit_s
        assert not of_run(run_dir)
        assert started.process.returncode == ExitCode.INTERRUPTED
    assert "allranks: the grace is over: ending all ranks" in started.lines
    assert "killed after SIGTERM and 1.0 s of grace" in started.lines[-1]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("behaviour", ["heed", "stubborn"])
def test_a_signal_during_the_start_is_heeded(behaviour: str, run_dir: Path) -> None:
    with launch(run_dir, behaviour, grace_s=10) as started:
        until(lambda: bool(started.below()), "accelerate is there")
        started.process.send_signal(signal.SIGTERM)
        if behaviour == "stubborn":
            started.wait_for("[rank 0] ready")  # seconds later
            started.process.send_signal(signal.SIGTERM)
        assert started.wait() == ExitCode.INTERRUPTED
        assert not of_run(run_dir)


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_quickly(victim: int, run_dir: Path) -> None:
    with launch(run_dir, "deaf") as started:
        started.wait_for("[rank 0] ready", "[rank 1] ready")
        started.rank(victim).kill()
        assert until(lambda: started.process.poll() is not None, "the launcher leaves") < 10
        assert not of_run(run_dir)
        assert started.process.returncode == ExitCode.RANK_LOST
    assert started.lines[-1].startswith(f"outcome: rank {victim} was killed by SIGKILL; if nobody did that")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_ranks_do_not_outlive_a_killed_accelerate(kind: str, run_dir: Path) -> None:
    with launch(run_dir, "stubborn", kind=kind) as started:
        started.wait_for("[rank 0] ready")
        started.accelerate().kill()
        assert started.wait() == ExitCode.RANK_LOST
        assert not of_run(run_dir)
    assert started.lines[-1] == "outcome: accelerate launch was killed by SIGKILL, its ranks with it"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_ranks_do_not_outlive_a_killed_launcher(kind: str, run_dir: Path) -> None:
    with launch(run_dir, "deaf", kind=kind) as started:
        started.wait_for("[rank 0] ready")
        started.process.kill()
        started.process.wait()
        until(lambda: not of_run(run_dir), "all ranks are gone", deadline_s=15)


@pytest.mark.timeout(90)
def test_ranks_of_a_killed_launcher_keep_a_second_launch_away(run_dir: Path) -> None:
    with launch(run_dir, "stubborn", kind="single") as started:
        started.wait_for("[rank 0] ready")
        started.process.kill()
        started.process.wait()
        assert is_held(run_dir)
        with pytest.raises(UserError, match="are still saving and leaving"), launch_lock(run_dir):
            pass
        until(lambda: not of_run(run_dir), "all ranks are gone", deadline_s=15)
    with launch_lock(run_dir):
        pass


@pytest.mark.timeout(90)
def test_an_orphan_with_its_own_session_is_ended(run_dir: Path) -> None:
    with launch(run_dir, "with_orphan") as started:
        assert started.wait() == ExitCode.OK
        assert not of_run(run_dir)
    assert "[rank 0] orphan" in started.lines
    assert "[rank 1] orphan" in started.lines


# --- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
def test_no_line_is_lost_or_torn(run_dir: Path) -> None:
    count = 3000
    with launch(run_dir, "talkative", str(count)) as started:
        assert started.wait() == ExitCode.OK
    *lines, outcome = started.lines
    assert outcome == "outcome: finished at step 3: as told"
    assert len(lines) == 2 * (count + 1)
    for rank in range(2):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [*(f"line {number} {'x' * 100}" for number in range(count)), "unfinished"]


@pytest.mark.timeout(90)
def test_a_reader_that_leaves_does_not_end_the_run(run_dir: Path) -> None:
    reading, writing = os.pipe()
    with launch(run_dir, "talkative", "3000", stdout=writing) as started:
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)
        assert started.wait() == ExitCode.OK
    assert len((run_dir / "logs" / "launch-0001" / "rank1.log").read_text().splitlines()) == 3001


@pytest.mark.timeout(90)
def test_a_terminal_that_closes_stops_the_run_in_order(run_dir: Path) -> None:
    screen, terminal = pty.openpty()
    with launch(run_dir, "heed", stdout=terminal) as started:
        os.close(terminal)
        until(lambda: (run_dir / "logs/launch-0001/rank1.log").exists(), "rank 1 runs")
        os.close(screen)
        started.process.send_signal(signal.SIGHUP)
        assert started.wait() == ExitCode.INTERRUPTED
    for rank in range(2):
        assert "saving because of SIGHUP" in (run_dir / f"logs/launch-0001/rank{rank}.log").read_text()


@pytest.mark.timeout(90)
def test_a_terminal_sees_the_live_line_of_rank_0(run_dir: Path) -> None:
    screen, terminal = pty.openpty()
    shown = b""
    with launch(run_dir, "progress", stdout=terminal) as started:
        os.close(terminal)
        while True:
            try:
                shown += os.read(screen, 65536)
            except OSError:  # how a terminal says that nobody writes to it any more
                break
        assert started.wait() == ExitCode.OK
    os.close(screen)
    text = shown.decode()
    steps = re.findall(r"\r\x1b\[K\[rank 0\] step (\d)/4", text)
    assert len(steps) >= 4
    assert steps == sorted(steps)
    assert "[rank 1] step" not in text
    assert "[rank 0] all steps done\r\n" in text
    assert "[rank 1] all steps done\r\n" in text
