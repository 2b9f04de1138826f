from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from allranks.coordinator.heartbeats import Heartbeat, Hung, Pulse, Sighting, find_hung
from allranks.coordinator.liveness import Liveness

TIMEOUT_S = 8.0
STACKS = Path("stacks")


def heartbeat(number: int = 1, progress: int = 1, *, waiting: str | None = None, left: bool = False) -> Heartbeat:
    return Heartbeat(
        number=number,
        progress=progress,
        where="forward, step 7",
        waiting=waiting,
        host="a",
        pid=1,
        started=0.0,
        left=left,
    )


def seen(silent_s: float, still_s: float, **kind: object) -> Sighting:
    return Sighting(heartbeat=heartbeat(**kind), silent_s=silent_s, still_s=still_s)  # type: ignore[arg-type]


MOVING = seen(0.5, 0.5)
WAITING = seen(0.5, 99.0, waiting="vote 1")


@pytest.mark.parametrize(
    ("ranks", "hung", "not_answering", "culprits"),
    [
        pytest.param([MOVING, MOVING], None, (), (), id="all move"),
        pytest.param([MOVING, seen(0.5, 7.9)], None, (), (), id="still, not for long enough"),
        pytest.param([MOVING, seen(7.9, 7.9)], None, (), (), id="silent, not for long enough"),
        pytest.param([MOVING, WAITING], None, (), (), id="one waits for a slow one"),
        pytest.param([MOVING, seen(0.5, 8.0)], (1,), (), (1,), id="one still, one moves"),
        pytest.param([WAITING, seen(0.5, 8.0)], (1,), (), (1,), id="one still, one waits for it"),
        pytest.param([MOVING, seen(8.0, 8.0)], (1,), (1,), (1,), id="one silent"),
        pytest.param([MOVING, seen(8.0, 8.0, waiting="vote 1")], (1,), (1,), (1,), id="one silent in its wait"),
        pytest.param([MOVING, Sighting(silent_s=8.0, still_s=8.0)], (1,), (1,), (1,), id="never heard of"),
        pytest.param([seen(0.5, 8.0), seen(0.5, 4.0)], (0, 1), (), (), id="both still, one a little later"),
        pytest.param([seen(0.5, 8.0), seen(0.5, 3.9)], (0,), (), (0,), id="one still, one has just stopped moving"),
        pytest.param([seen(0.5, 8.0), seen(7.0, 7.5)], (0, 1), (1,), (1,), id="still beside silent: the silent one"),
        pytest.param([WAITING, WAITING], (0, 1), (), (), id="each waits and none moves"),
        pytest.param([WAITING, seen(0.5, 7.0, waiting="vote 1")], None, (), (), id="each waits, one not for long"),
        pytest.param([MOVING, seen(99.0, 99.0, left=True)], None, (), (), id="one left"),
        pytest.param([WAITING, seen(99.0, 99.0, left=True)], (0,), (), (0,), id="one waits for one that left"),
        pytest.param([seen(99.0, 99.0, left=True)] * 2, None, (), (), id="all left"),
    ],
)
def test_who_is_hung(
    ranks: list[Sighting], hung: tuple[int, ...] | None, not_answering: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    found = find_hung(ranks, TIMEOUT_S, STACKS)
    if hung is None:
        assert found is None
    else:
        assert found is not None
        assert (found.ranks, found.not_answering, found.culprits) == (hung, not_answering, culprits)
        assert found.for_s >= TIMEOUT_S


def test_a_sighting_counts_from_the_last_news() -> None:
    one = Sighting()
    one.look(None, 1.0)
    assert (one.silent_s, one.still_s) == (1.0, 1.0)
    one.look(heartbeat(1, 1), 1.0)
    assert (one.silent_s, one.still_s) == (0.0, 0.0)
    one.look(heartbeat(2, 1), 1.0)
    assert (one.silent_s, one.still_s) == (0.0, 1.0), "it publishes and does not move"
    one.look(heartbeat(2, 1), 1.0)
    assert (one.silent_s, one.still_s) == (1.0, 2.0), "it publishes nothing"
    one.look(heartbeat(3, 2), 1.0)
    assert (one.silent_s, one.still_s) == (0.0, 0.0)


def test_messages_say_what_is_known() -> None:
    places = ("forward, step 7", "forward, step 7", "data, step 7")
    unknown = Hung(ranks=(0, 1, 2), not_answering=(), where=places, for_s=12.3, stacks=STACKS)
    assert unknown.message == (
        "no progress for 12 s of ranks 0, 1 (forward, step 7); rank 2 (data, step 7); which of them is the cause is "
        "not known; stacks in stacks"
    )
    silent = Hung(ranks=(0, 1, 2), not_answering=(2,), where=places, for_s=12.3, stacks=STACKS)
    assert silent.message == "nothing heard for 12 s of rank 2 (data, step 7); stacks in stacks"


def test_a_pulse_remembers_where_and_for_what() -> None:
    pulse = Pulse()
    pulse.beat("forward", 7, 2)
    before = pulse.place()
    assert (before.where, before.waiting) == ("forward, step 7, micro-step 2", None)
    with pytest.raises(KeyError), pulse.waiting("vote 1"):
        assert pulse.place().waiting == "vote 1"
        with pulse.waiting("a collective"):
            pulse.beat("reduce", 7)
            assert (pulse.place().where, pulse.place().waiting) == ("reduce, step 7", "a collective")
        assert pulse.place().waiting == "vote 1"
        inside = pulse.place().beats
        raise KeyError
    after = pulse.place()
    assert after.waiting is None
    assert after.beats > inside > before.beats, "who has just stopped to wait has moved"


Watch = Callable[..., Liveness]
HANG_TIMEOUT_S = 0.4
DEADLINE_S = 20.0


class Told(list[Hung]):
    """What one rank was told."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, hung: Hung) -> None:
        self.append(hung)
        self.came.set()

    def wait_without_moving(self) -> None:
        assert self.came.wait(DEADLINE_S)

    def wait_and_move(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self.came.is_set():
            assert time.monotonic() < until
            sorted(range(100), key=lambda number: -number)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A started rank 0 of two, closed at the end."""
    started: list[Liveness] = []

    def start(store: object, on_hang: Callable[[Hung], None], **given: object) -> Liveness:
        arguments = {
            "rank": 0,
            "world_size": 2,
            "key": "k",
            "pulse": Pulse(),
            "hang_timeout_s": HANG_TIMEOUT_S,
            **given,
        }
        started.append(Liveness(store=store, stacks_dir=tmp_path / "stacks", on_hang=on_hang, **arguments))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.close()


def python_that_moves(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sorted(range(100), key=lambda number: -number)


def test_one_rank_is_watched_too(watch: Watch) -> None:
    told = Told()
    watch(dist.HashStore(), told, world_size=1)
    python_that_moves(4 * HANG_TIMEOUT_S)
    assert not told, "no beat, but the stack moves"
    told.wait_without_moving()
    (hung,) = told
    assert (hung.ranks, hung.not_answering, hung.culprits) == ((0,), (), (0,))
    text = (hung.stacks / "rank0.txt").read_text()
    assert "in wait_without_moving" in text
    assert text.startswith("rank 0 in start, step 0; process ")


def test_beats_alone_are_progress(watch: Watch) -> None:
    told, pulse, enough = Told(), Pulse(), threading.Event()
    watch(dist.HashStore(), told, world_size=1, pulse=pulse)

    def beat() -> None:
        while not enough.wait(0.02):
            pulse.beat("step", 1)

    beating = threading.Thread(target=beat)
    beating.start()
    time.sleep(4 * HANG_TIMEOUT_S)
    assert not told, "the main thread slept in one call, and beat"
    enough.set()
    beating.join()


def test_all_that_answer_are_told_the_same_once(watch: Watch, tmp_path: Path) -> None:
    store, first, second = dist.HashStore(), Told(), Told()
    for rank, told in enumerate((first, second)):
        watch(store, told, rank=rank)
    first.wait_without_moving()
    second.came.wait(DEADLINE_S)
    time.sleep(HANG_TIMEOUT_S)
    assert len(first) == 1
    assert first == second
    assert first[0].ranks == (0, 1)
    assert {path.name for path in (tmp_path / "stacks").iterdir()} == {"rank0.txt", "rank1.txt"}


class FrozenStore(dist.HashStore):
    """Answers as long as nobody freezes it; a server whose process is stopped lets its callers wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = threading.Event()
        self.killed = threading.Event()

    def clone(self) -> FrozenStore:
        return self

    def set(self, key: str, value: str) -> None:
        if self.frozen.is_set():
            self.killed.wait()
            raise RuntimeError("Connection reset by peer")
        super().set(key, value)


def frozen_with_rank_0_heard(store: FrozenStore, told: Told, watch: Watch) -> Liveness:
    process = psutil.Process()
    beat = asdict(heartbeat()) | {"host": "elsewhere", "pid": process.pid, "started": process.create_time()}
    store.set("k/alive/0", json.dumps(beat))
    liveness = watch(store, told, rank=1)
    python_that_moves(HANG_TIMEOUT_S / 3)
    store.frozen.set()
    return liveness


def test_a_store_that_does_not_answer_is_rank_0(watch: Watch) -> None:
    store, told = FrozenStore(), Told()
    frozen_with_rank_0_heard(store, told, watch)
    python_that_moves(HANG_TIMEOUT_S / 2)
    assert not told
    told.wait_and_move()
    (hung,) = told
    assert (hung.ranks, hung.not_answering, hung.where) == ((0,), (0,), ("forward, step 7",))
    assert [path.name for path in hung.stacks.iterdir()] == ["rank1.txt"], "rank 0 runs on another host"
    store.killed.set()
    python_that_moves(HANG_TIMEOUT_S)
    assert len(told) == 1


def test_a_store_killed_after_it_was_silent_is_a_hang(watch: Watch) -> None:
    store, told = FrozenStore(), Told()
    frozen_with_rank_0_heard(store, told, watch)
    python_that_moves(0.8 * HANG_TIMEOUT_S)
    store.killed.set()  # by a peer that noticed it a little earlier
    told.wait_and_move()
    assert [hung.not_answering for hung in told] == [(0,)]


def test_a_store_that_just_goes_is_no_hang(watch: Watch) -> None:
    store, told = FrozenStore(), Told()
    store.killed.set()
    frozen_with_rank_0_heard(store, told, watch)
    python_that_moves(3 * HANG_TIMEOUT_S)
    assert not told


def test_closing_with_a_frozen_store_is_quick_and_silent(watch: Watch) -> None:
    store, told = FrozenStore(), Told()
    liveness = frozen_with_rank_0_heard(store, told, watch)
    python_that_moves(HANG_TIMEOUT_S / 4)
    began = time.monotonic()
    liveness.close()
    assert time.monotonic() - began < 3.0
    python_that_moves(2 * HANG_TIMEOUT_S)
    assert not told
    store.killed.set()


def test_who_left_is_not_missed(watch: Watch) -> None:
    store, told = dist.HashStore(), Told()
    watch(store, told)
    leaving = watch(store, told, rank=1)
    python_that_moves(HANG_TIMEOUT_S / 2)
    leaving.close()
    python_that_moves(4 * HANG_TIMEOUT_S)
    assert not told


@pytest.fixture
def stopped_child() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    child.send_signal(signal.SIGSTOP)
    process = psutil.Process(child.pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    yield process
    child.kill()
    child.wait()


@pytest.mark.parametrize("its_own", [True, False])
def test_only_the_very_process_is_killed(watch: Watch, stopped_child: psutil.Process, its_own: bool) -> None:
    store, told = dist.HashStore(), Told()
    liveness = watch(store, told)
    python_that_moves(HANG_TIMEOUT_S / 4)
    mine = json.loads(store.get("k/alive/0"))
    started = stopped_child.create_time() - (0 if its_own else 60)
    store.set("k/alive/1", json.dumps(mine | {"pid": stopped_child.pid, "started": started}))
    told.wait_and_move()
    (hung,) = told
    assert hung.not_answering == (1,)
    assert liveness.kill_not_answering(hung) == ((1,) if its_own else ())
    if its_own:
        assert "stopped" in (hung.stacks / "rank1.txt").read_text()
        assert stopped_child.wait(10) is not None or not stopped_child.is_running()
    else:
        assert not (hung.stacks / "rank1.txt").exists()
        assert stopped_child.status() == psutil.STATUS_STOPPED
