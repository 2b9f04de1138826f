"""Liveness among real processes: who is stopped or stuck is found and named, who is slow or waits is not."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import liveness_stand_in
import pytest
from liveness_stand_in import HUNG_STATUS, Here, enter

from runs import free_port

HANG_TIMEOUT_S = 2.5
FOUND_WITHIN_S = HANG_TIMEOUT_S + 3.0
PATIENT_S = 6.0
"""Time-out of the tests in which nobody may be reported: a busy machine alone holds a process up for seconds."""
DEADLINE_S = 90.0

pytestmark = pytest.mark.timeout(240)

SERVER = multiprocessing.get_context("forkserver")
# Ranks are forked from a process without threads that has loaded these: importing torch is most of a start.
SERVER.set_forkserver_preload(["torch.distributed", "allranks.coordinator.agreement", "allranks.coordinator.liveness"])


def enter_with_output(folder: Path, rank: int, *rest: Any) -> None:
    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    enter(folder, rank, *rest)


class Ranks:
    """Started stand-ins, rank by rank.

    Args:
        folder: where they leave what they have to say.
    """

    def __init__(self, folder: Path, world_size: int, behaviour: str, hang_timeout_s: float) -> None:
        self.folder = folder
        port = free_port()
        self.processes = [
            SERVER.Process(target=enter_with_output, args=(folder, rank, world_size, port, hang_timeout_s, behaviour))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def time_of(self, mark: str, rank: int) -> float:
        """When a rank left this mark, as its `time.time()`; waits for it."""
        path = self.folder / f"{mark}{rank}"
        until = time.monotonic() + DEADLINE_S
        while not path.exists() or not path.read_text():
            assert time.monotonic() < until, self.output()
            time.sleep(0.05)
        return float(path.read_text())

    def all_ready(self) -> None:
        for rank in range(len(self.processes)):
            self.time_of("ready", rank)

    def send(self, rank: int, number: signal.Signals) -> float:
        os.kill(self.pid(rank), number)
        return time.time()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def enough(self) -> None:
        (self.folder / "enough").touch()

    def statuses(self) -> list[int | None]:
        for process in self.processes:
            process.join(DEADLINE_S)
        return [process.exitcode for process in self.processes]

    def hung(self, rank: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"hung{rank}.json").read_text())
        return told

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank{rank}.txt").read_text()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output*.txt")))

    def told(self) -> list[str]:
        """What ranks were told of hangs, and which of them have ended."""
        return [path.read_text() for path in sorted(self.folder.glob("hung*.json"))] + [
            f"rank {rank} has ended" for rank, process in enumerate(self.processes) if not process.is_alive()
        ]

    def finish(self) -> None:
        self.enough()
        assert self.statuses() == [0] * len(self.processes), self.told()


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Ranks] = []

    def begin(world_size: int, behaviour: str, hang_timeout_s: float = HANG_TIMEOUT_S) -> Ranks:
        started.append(Ranks(tmp_path, world_size, behaviour, hang_timeout_s))
        return started[-1]

    yield begin
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.join()


def line_in(function: Callable[..., Any], text: str) -> int:
    """Number of the line with `text` in a function."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [offset for offset, line in enumerate(lines) if text in line]
    return first + offset


def test_a_rank_that_sleeps_for_ever_is_found_by_the_line(start: Start) -> None:
    ranks = start(3, "one_sleeps")
    since = ranks.time_of("stuck", 2)
    assert ranks.statuses() == [HUNG_STATUS] * 3
    for rank in range(3):
        hung = ranks.hung(rank)
        assert (hung["ranks"], hung["culprits"], hung["not_answering"]) == ([2], [2], [])
        assert hung["where"] == ["forward, step 7, micro-step 2"]
        assert hung["killed"] == []
        assert HANG_TIMEOUT_S * 0.9 < hung["at"] - since < FOUND_WITHIN_S
    assert f"line {line_in(Here.sleep_for_ever, 'time.sleep')} in sleep_for_ever" in ranks.stacks(2)
    for rank in (0, 1):
        assert "in exchange" in ranks.stacks(rank)


@pytest.mark.parametrize("behaviour", ["steps", "rank_0_computes"])
def test_a_stopped_rank_is_found_and_killed_even_in_its_wait(start: Start, behaviour: str) -> None:
    ranks = start(3, behaviour)
    ranks.all_ready()
    time.sleep(0.5)
    since = ranks.send(1, signal.SIGSTOP)
    assert ranks.statuses() == [HUNG_STATUS, -signal.SIGKILL, HUNG_STATUS]
    for rank in (0, 2):
        hung = ranks.hung(rank)
        assert (hung["culprits"], hung["not_answering"]) == ([1], [1])
        assert hung["at"] - since < FOUND_WITHIN_S
        assert hung["killed"] == ([1] if rank == 0 else []), "one rank of the host sees to it"
        assert " in " in ranks.stacks(rank)
    assert "State:\tT (stopped)" in ranks.stacks(1)


def test_rank_0_stopped_with_its_store_is_found_and_killed(start: Start) -> None:
    ranks = start(3, "steps")
    ranks.all_ready()
    since = ranks.send(0, signal.SIGSTOP)
    assert ranks.statuses() == [-signal.SIGKILL, HUNG_STATUS, HUNG_STATUS]
    for rank in (1, 2):
        hung = ranks.hung(rank)
        assert (hung["ranks"], hung["not_answering"]) == ([0], [0])
        assert hung["at"] - since < FOUND_WITHIN_S
        assert hung["killed"] == ([0] if rank == 1 else [])
        assert " in " in ranks.stacks(rank)
    assert "State:\tT (stopped)" in ranks.stacks(0)


def test_a_rank_stopped_together_with_the_store_is_killed_too(start: Start) -> None:
    ranks = start(3, "steps")
    ranks.all_ready()
    ranks.send(2, signal.SIGSTOP)
    since = ranks.send(0, signal.SIGSTOP)
    assert ranks.statuses() == [-signal.SIGKILL, HUNG_STATUS, -signal.SIGKILL]
    hung = ranks.hung(1)
    assert 0 in hung["not_answering"]
    assert hung["at"] - since < FOUND_WITHIN_S
    assert hung["killed"] == [0, 2]
    assert "State:\tT (stopped)" in ranks.stacks(2)


@pytest.mark.parametrize("paused", [[0], [1], [0, 1]])
def test_pauses_shorter_than_the_time_out_are_no_hang(start: Start, paused: list[int]) -> None:
    ranks = start(2, "steps", PATIENT_S)
    ranks.all_ready()
    for _ in range(3):
        for rank in paused:
            ranks.send(rank, signal.SIGSTOP)
        time.sleep(PATIENT_S * 0.4)
        for rank in paused:
            ranks.send(rank, signal.SIGCONT)
        time.sleep(PATIENT_S * 0.2)
    assert ranks.told() == []
    ranks.finish()


def test_all_ranks_paused_for_long_and_continued_blame_nobody(start: Start) -> None:
    ranks = start(2, "steps", PATIENT_S)
    ranks.all_ready()
    for rank in range(2):
        ranks.send(rank, signal.SIGSTOP)
    time.sleep(1.5 * PATIENT_S)
    for rank in range(2):
        ranks.send(rank, signal.SIGCONT)
    time.sleep(PATIENT_S)
    assert ranks.told() == []
    ranks.finish()


def test_a_rank_slowed_twentyfold_is_not_reported(start: Start) -> None:
    ranks = start(2, "steps", PATIENT_S)
    ranks.all_ready()
    ended = threading.Event()

    def throttle() -> None:
        with suppress(ProcessLookupError):
            while not ended.is_set():
                ranks.send(1, signal.SIGSTOP)
                time.sleep(0.38)
                ranks.send(1, signal.SIGCONT)
                time.sleep(0.02)

    throttling = threading.Thread(target=throttle)
    throttling.start()
    time.sleep(4 * PATIENT_S)
    told = ranks.told()
    ended.set()
    throttling.join()
    assert told == []
    ranks.finish()
    assert json.loads((ranks.folder / "steps1").read_text())["slowest_s"] > 1.5 * PATIENT_S, "not slow enough"


def test_a_slow_rank_without_a_beat_and_those_that_wait_for_it_are_not_reported(start: Start) -> None:
    ranks = start(3, "rank_0_computes", PATIENT_S)
    ranks.all_ready()
    time.sleep(3 * PATIENT_S)
    assert ranks.told() == []
    ranks.finish()


@pytest.mark.parametrize(
    ("behaviour", "hung_ranks", "culprits"),
    [
        ("endless_collective", [0, 1, 2], []),
        ("endless_collective_marked", [2], [2]),
        ("crossed_waits", [0, 1, 2], []),
    ],
)
def test_a_collective_that_never_ends(start: Start, behaviour: str, hung_ranks: list[int], culprits: list[int]) -> None:
    ranks = start(3, behaviour)
    since = ranks.time_of("stuck", 2)
    assert ranks.statuses() == [HUNG_STATUS] * 3
    for rank in range(3):
        hung = ranks.hung(rank)
        assert (hung["ranks"], hung["culprits"], hung["not_answering"]) == (hung_ranks, culprits, [])
        assert ("not known" in hung["message"]) == (not culprits)
        assert hung["at"] - since < FOUND_WITHIN_S
    assert "in all_reduce" in ranks.stacks(0)
    assert ("in exchange" if behaviour == "crossed_waits" else "in sleep_for_ever") in ranks.stacks(2)


def test_closing_makes_no_noise(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    arguments = [str(free_port()), str(HANG_TIMEOUT_S), "steps"]
    # Interpreters of their own: a forked process leaves without taking its interpreter down.
    ranks = [
        subprocess.Popen(
            [sys.executable, liveness_stand_in.__file__, str(tmp_path), str(rank), "3", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert outputs == ["", "", ""]
    assert not (tmp_path / "stacks").exists()
