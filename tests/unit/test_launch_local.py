"""The parts of a local launch that need no processes; tests/dist/test_launch.py starts real ones."""

from __future__ import annotations

import errno
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import ExitCode, UserError
from allranks.launch import local
from allranks.launch.command import LaunchRequest
from allranks.launch.local import _stop_signals
from allranks.launch.logs import Console, LineSplitter, RankLogs, last_lines
from allranks.launch.outcome import Death, agreed, before_report, first_death, unexplained
from allranks.launch.restarts import DeathWatch
from allranks.rundir import (
    STOP_REQUEST,
    is_held,
    launch_lock,
    launch_log_dir,
    launch_log_path,
    next_launch,
    request_stop,
    stop_requested,
)
from allranks.verdict import Verdict

# --- lines -----------------------------------------------------------------------------------------------------------


def split(*chunks: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\r 10%\r 20%\r100%\ndone\n", ["100%", "done"]),
        (b"step 1\rstep 2\rloss 3\n", ["loss 3"]),
        (b"step 1\rstep 2\r", ["step 2"]),
        ("größe\n".encode(), ["größe"]),
        (b"\xff\n", ["�"]),
        (b"", []),
    ],
)
def test_lines_are_what_a_terminal_would_show(written: bytes, lines: list[str]) -> None:
    assert split(written) == lines


@given(
    text=st.text(alphabet="ab\r\né€", max_size=60),
    cuts=st.lists(st.integers(min_value=0, max_value=120), max_size=8),
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(bounds)]
    assert split(*pieces) == split(data)


def test_the_live_line_is_the_last_state_of_the_unfinished_one() -> None:
    splitter = LineSplitter()
    seen = []
    for chunk in (b"\r 10%", b"\r 20%", b"\n", b"step 3/9\r", b"step 4/9\r", b"loss"):
        splitter.feed(chunk)
        seen.append(splitter.live)
    assert seen == [" 10%", " 20%", "", "step 3/9", "step 4/9", "loss"]


def test_a_progress_bar_that_never_ends_its_line_takes_no_memory() -> None:
    splitter = LineSplitter()
    for step in range(20_000):
        assert splitter.feed(f"step {step}\r".encode()) == []
    assert splitter.finish() == ["step 19999"]
    assert splitter.feed(b"x" * 100_000)


# --- console ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_the_live_line_below_the_lines() -> None:
    screen = Terminal()
    console = Console(screen)
    console.live("step 1")
    console.line("loss 2.5")
    console.live("")
    console.line("done")
    assert screen.getvalue() == "\r\x1b[Kstep 1\r\x1b[Kloss 2.5\nstep 1\r\x1b[Kdone\n"


def test_a_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = Terminal()
    Console(screen).live("x" * 50)
    assert screen.getvalue() == "\r\x1b[K" + "x" * 19


def test_a_file_gets_no_live_line() -> None:
    file = io.StringIO()
    console = Console(file)
    console.live("step 1")
    console.line("loss 2.5")
    assert file.getvalue() == "loss 2.5\n"


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        console = Console(pipe)
        console.line("first")
        console.line("second")  # and closing the pipe flushes into nowhere


def test_a_terminal_without_the_character_gets_another_one(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as file:
        Console(file).line("100 % █")
    assert (tmp_path / "out").read_bytes() == b"100 % ?\n"


# --- logs of the ranks -----------------------------------------------------------------------------------------------


def test_the_ranks_lines_carry_the_rank_and_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    screen = io.StringIO()
    logs = RankLogs(tmp_path, 12, Console(screen))
    logs.pump()
    (tmp_path / "rank10.log").write_text("late\nunfinished")
    (tmp_path / "rank2.log").write_text("early\n")
    (tmp_path / "rank.log.txt").write_text("not a rank's\n")
    logs.pump()
    with (tmp_path / "rank10.log").open("a") as file:
        file.write(" line")
    logs.finish()
    assert screen.getvalue() == "[rank  2] early\n[rank 10] late\n[rank 10] unfinished line\n"


def test_only_rank_0_draws_the_live_line(tmp_path: Path) -> None:
    screen = Terminal()
    logs = RankLogs(tmp_path, 2, Console(screen))
    (tmp_path / "rank0.log").write_text("step 1\r")
    (tmp_path / "rank1.log").write_text("step 1\r")
    logs.pump()
    assert screen.getvalue() == "\r\x1b[K[rank 0] step 1"


def test_a_live_line_does_not_outlive_the_lines_after_it(tmp_path: Path) -> None:
    screen = Terminal()
    logs = RankLogs(tmp_path, 1, Console(screen))
    log = tmp_path / "rank0.log"
    log.write_text("step 1\r")
    logs.pump()
    log.write_text("step 1\rsaved\nstep 2\r")
    logs.pump()
    log.write_text("step 1\rsaved\nstep 2\rdone\n")
    logs.pump()
    clear = "\r\x1b[K"
    assert (
        screen.getvalue()
        == f"{clear}[rank 0] step 1{clear}[rank 0] saved\n{clear}[rank 0] step 2{clear}[rank 0] done\n"
    )


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    assert last_lines(log, 3) == []
    log.write_text("".join(f"line {n}\n\n" for n in range(5000)) + "10%\r20%\rthe end")
    assert last_lines(log, 3) == ["line 4998", "line 4999", "the end"]


# --- run directory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"stop", b"[]", b"null", b"{}", b'{"reason"', b"\xff"])
def test_any_file_of_that_name_is_a_stop_request(content: bytes, tmp_path: Path) -> None:
    (tmp_path / STOP_REQUEST).write_bytes(content)
    assert stop_requested(tmp_path) == STOP_REQUEST


def test_a_full_disk_refuses_the_lock_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with (
            pytest.raises(UserError, match="No space left on device\n    fix: make room, or give"),
            launch_lock(tmp_path),
        ):
            pass
    with launch_lock(tmp_path):  # the refused one has let go of it
        pass


@pytest.mark.parametrize(("free", "code"), [(4096, ExitCode.STORAGE), (2**30, ExitCode.CRASH), (None, ExitCode.CRASH)])
def test_who_dies_without_a_word_on_a_full_disk_had_no_room(
    free: int | None, code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "free_bytes", lambda _path: free)
    (tmp_path / "launcher.log").touch()
    request = LaunchRequest(argv=("x",), env={}, unset=(), log_dir=tmp_path, launch=1)
    deaths = DeathWatch(tmp_path, tmp_path, 1, Console(sys.stdout))
    outcome = local._outcome(tmp_path, request, 1, None, deaths)
    assert outcome.exit_code is code
    assert ("is full (4 KiB free)" in outcome.message) == (code is ExitCode.STORAGE)


def test_launches_are_numbered_from_one_and_never_reused(tmp_path: Path) -> None:
    assert next_launch(tmp_path) == 1
    launch_log_dir(tmp_path, 1).mkdir(parents=True)
    launch_log_dir(tmp_path, 10_000).mkdir()
    (tmp_path / "logs" / "launch-old").mkdir()
    assert next_launch(tmp_path) == 10_001
    assert launch_log_path(tmp_path, 7, 3) == tmp_path / "logs" / "launch-0007" / "rank3.log"


def test_a_stop_request_carries_its_reason(tmp_path: Path) -> None:
    assert stop_requested(tmp_path) is None
    request_stop(tmp_path, "SIGTERM")
    assert stop_requested(tmp_path) == "SIGTERM"
    assert json.loads((tmp_path / STOP_REQUEST).read_text())["time"] > 0


def hold(run_dir: Path, held: multiprocessing.synchronize.Event, leave: multiprocessing.synchronize.Event) -> None:
    with launch_lock(run_dir):
        held.set()
        leave.wait(30)


@pytest.mark.timeout(60)
def test_a_run_directory_has_one_launcher(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    processes = multiprocessing.get_context("spawn")
    held, leave = processes.Event(), processes.Event()
    holder = processes.Process(target=hold, args=(tmp_path, held, leave))
    holder.start()
    assert held.wait(30)
    assert is_held(tmp_path)
    in_use = rf"in use by a live launch \(pid {holder.pid} on "
    with pytest.raises(UserError, match=in_use) as refused, launch_lock(tmp_path):
        pass
    assert "another --name" in str(refused.value)
    assert is_held(tmp_path)
    holder.kill()
    holder.join(30)
    assert not is_held(tmp_path)
    with launch_lock(tmp_path):
        assert is_held(tmp_path)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks_is_said_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", no_locks)
    with launch_lock(tmp_path) as word:
        assert word == f"{tmp_path} can't be locked (No locks available): don't start this run twice at the same time"
    assert not is_held(tmp_path)


# --- stop signals ----------------------------------------------------------------------------------------------------


def test_an_ignored_signal_stays_ignored_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with _stop_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert received.names == ["SIGTERM"]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


# --- how it ended ----------------------------------------------------------------------------------------------------


def torchrun_report(*failures: tuple[int, int, str]) -> str:
    """What torchrun 2.13 writes; the first observed failure is the last one here."""
    box = [
        f"[{index}]:\n  time      : 2026-11-30_{time}\n  host      : node\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {status} (pid: 6695)  (SIGTERM)\n  error_file: <N/A>\n  traceback : none"
        for index, (rank, status, time) in enumerate(failures)
    ]
    return (
        "W1130 16:24:05.1 66 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6 closing signal\n"
        'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\nallranks.train FAILED\n----\n"
        "Failures:\n"
        + "\n".join(box[:-1] or ["  <NO_OTHER_FAILURES>"])
        + f"\n----\nRoot Cause (first observed failure):\n{box[-1]}\n====\n"
    )


ONE_PROCESS_REPORT = (
    'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\n'
    '  File "/x/accelerate/commands/launch.py", line 1423, in <module>\n    main()\n'
    "subprocess.CalledProcessError: Command '['python', '-m', 'allranks.train']' {}.\n"
)


@pytest.mark.parametrize(
    ("log", "death"),
    [
        (torchrun_report((0, -15, "16:24:05"), (1, -9, "16:24:05")), Death(rank=1, status=-9)),
        (torchrun_report((3, 1, "16:24:05")), Death(rank=3, status=1)),
        # Rank 1 was killed; rank 0 lost its connection and failed before torchrun looked.
        (torchrun_report((1, -9, "16:24:05"), (0, 1, "16:24:05")), Death(rank=1, status=-9)),
        # Rank 0 failed; torchrun killed the stuck rank 1 half a minute later.
        (torchrun_report((1, -9, "16:24:35"), (0, 1, "16:24:05")), Death(rank=0, status=1)),
        # Rank 1 left without a word, rank 0 because its peer was gone.
        (torchrun_report((1, 1, "16:24:05"), (0, 5, "16:24:05")), Death(rank=1, status=1)),
        (torchrun_report((1, -15, "16:24:05"), (0, 5, "16:24:05")), Death(rank=0, status=5)),
        (ONE_PROCESS_REPORT.format("died with <Signals.SIGKILL: 9>"), Death(rank=0, status=-9)),
        (ONE_PROCESS_REPORT.format("returned non-zero exit status 3"), Death(rank=0, status=3)),
        ("RuntimeError: no launcher\n", None),
        ("", None),
    ],
)
def test_the_first_rank_to_die_is_found(log: str, death: Death | None) -> None:
    assert first_death(log) == death


def test_signals_have_names() -> None:
    assert [Death(rank=0, status=status).by_signal for status in (1, -9, -11, -63)] == [
        None,
        "SIGKILL",
        "SIGSEGV",
        "signal 63",
    ]


def test_lines_of_the_ranks_are_kept_apart_from_the_report() -> None:
    import_error = "/usr/bin/python: No module named allranks.train\n"
    for report in (torchrun_report((0, 1, "16:24:05")), ONE_PROCESS_REPORT.format("returned non-zero exit status 1")):
        assert before_report(import_error + report) == [import_error.strip()]
    assert before_report("all fine\n\n") == ["all fine"]


def outcome(
    tmp_path: Path, status: int, launcher_log: str, **ranks: str
) -> tuple[ExitCode, str, str | None, list[str]]:
    (tmp_path / "launcher.log").write_text(launcher_log)
    for rank, text in ranks.items():
        (tmp_path / f"{rank}.log").write_text(text)
    made = unexplained(status, tmp_path)
    return made.exit_code, made.message, made.log.name if made.log else None, list(made.tail)


def test_a_killed_rank_is_lost(tmp_path: Path) -> None:
    report = torchrun_report((0, -15, "16:24:05"), (1, -9, "16:24:05"))
    assert outcome(tmp_path, 1, report, rank0="fine\n", rank1="step 1\nstep 2\n") == (
        ExitCode.RANK_LOST,
        "rank 1 was killed by SIGKILL; if nobody did that, the kernel did for want of host memory (see dmesg)",
        "rank1.log",
        ["step 1", "step 2"],
    )


def test_a_rank_that_dies_in_native_code_is_lost(tmp_path: Path) -> None:
    report = torchrun_report((1, -11, "16:24:05"))
    code, message, *_ = outcome(tmp_path, 1, report, rank1="free(): invalid pointer\n")
    assert (code, message) == (ExitCode.RANK_LOST, "rank 1 was killed by SIGSEGV")


def test_a_traceback_is_a_crash(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\n  ...\nValueError: boom\n"
    assert outcome(tmp_path, 1, torchrun_report((1, 1, "16:24:05")), rank0="", rank1=trace) == (
        ExitCode.CRASH,
        "rank 1 failed with exit status 1",
        "rank1.log",
        trace.splitlines(),
    )


def test_leaving_without_a_word_is_a_lost_rank(tmp_path: Path) -> None:
    code, message, log, _ = outcome(tmp_path, 1, torchrun_report((1, 7, "16:24:05")), rank0="", rank1="step 1\n")
    assert (code, message, log) == (
        ExitCode.RANK_LOST,
        "rank 1 left without a word, with exit status 7",
        "rank1.log",
    )


def test_a_rank_may_leave_with_an_exit_code_of_ours(tmp_path: Path) -> None:
    report = torchrun_report((0, -15, "16:24:05"), (1, 2, "16:24:05"))
    assert outcome(tmp_path, 1, report, rank1="run.yaml: 1 problem\n") == (
        ExitCode.USAGE,
        "rank 1 stopped with exit status 2",
        "rank1.log",
        ["run.yaml: 1 problem"],
    )


def test_a_rank_that_never_got_its_log_is_explained_by_the_launchers(tmp_path: Path) -> None:
    report = "No module named allranks.train\n" + torchrun_report((0, 1, "16:24:05"))
    assert outcome(tmp_path, 1, report) == (
        ExitCode.CRASH,
        "rank 0 failed with exit status 1",
        "launcher.log",
        ["No module named allranks.train"],
    )


def test_what_a_rank_said_before_it_had_its_log_is_its_own(tmp_path: Path) -> None:
    for rank, error in ((0, "ImportError: mine"), (1, "ImportError: yours")):
        early = tmp_path / "torchrun" / "none_x" / "attempt_0" / str(rank) / "stderr.log"
        early.parent.mkdir(parents=True)
        early.write_text(f"Traceback (most recent call last):\n{error}\n")
    code, message, log, tail = outcome(tmp_path, 1, torchrun_report((1, 1, "16:24:05")))
    assert (code, message, log) == (ExitCode.CRASH, "rank 1 failed with exit status 1", "stderr.log")
    assert tail[-1] == "ImportError: yours"


def test_accelerate_itself_may_fail(tmp_path: Path) -> None:
    assert outcome(tmp_path, 2, "accelerate launch: error: unrecognised arguments\n") == (
        ExitCode.CRASH,
        "accelerate launch failed with exit status 2",
        "launcher.log",
        ["accelerate launch: error: unrecognised arguments"],
    )
    code, message, *_ = outcome(tmp_path, -9, "")
    assert (code, message) == (ExitCode.RANK_LOST, "accelerate launch was killed by SIGKILL, its ranks with it")


def test_a_good_end_without_a_verdict_is_a_fault_of_ours(tmp_path: Path) -> None:
    code, message, log, _ = outcome(tmp_path, 0, "", rank0="bye\n")
    assert (code, log) == (ExitCode.CRASH, "rank0.log")
    assert message == "all ranks left without an error and without a verdict: a fault of allranks"


@pytest.mark.parametrize("code", ExitCode)
def test_the_verdict_of_the_ranks_decides(code: ExitCode) -> None:
    made = agreed(Verdict(reason="out_of_memory", message="one sample does not fit", exit_code=code, step=4))
    assert (made.exit_code, made.message) == (code, "out_of_memory at step 4: one sample does not fit")
