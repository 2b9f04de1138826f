from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.caps import Caps
from allranks.checkpoints.background import BackgroundWriter, Snapshot
from allranks.checkpoints.store import CheckpointStore, TrainState
from allranks.errors import ExitCode
from allranks.plan.plan import PLAN_FILE

NAME = "base_model.model.layers.0.q_proj.lora_A.default.weight"
DEADLINE_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / PLAN_FILE).write_text("{}")
    return CheckpointStore(tmp_path, keep=2)


def snapshot_at(step: int) -> Snapshot:
    weight = torch.full((8, 64), float(step))
    state = TrainState.from_dict(
        {
            "step": step,
            "epoch": 0,
            "consumed": 8 * step,
            "global_batch_size": 8,
            "fingerprint": "f00d",
            "seed": 42,
            "window": 1,
            "caps": {"max_samples": 4, "max_tokens": None},
            "eval_caps": {"max_samples": 4, "max_tokens": None},
            "checkpointing": True,
            "skipped": [],
            "cost": [1.0, 0.0],
            "scaler": None,
            "optimizer": "adamw_torch_fused",
            "world_size": 2,
            "profile_kind": "ddp",
            "versions": {},
            "wall_s": 0.0,
            "approximate": False,
        }
    )
    assert state.caps == Caps(max_samples=4, max_tokens=None)
    return Snapshot(
        state=state, adapter={NAME: weight}, optimizer={NAME: {"exp_avg": weight * 2}}, peft_config={"r": 8}, tied={}
    )


def nothing() -> None:
    pass


class Disk:
    """`os.fsync` as a test wants it: it waits until the test lets it go on, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.errors: list[Exception] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._slow)

    def _slow(self, descriptor: int) -> None:
        assert self.goes_on.wait(DEADLINE_S)
        if self.errors:
            raise self.errors.pop(0)
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Disk(monkeypatch)
    yield made
    made.goes_on.set()


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_writer_publishes_while_its_owner_goes_on(store: CheckpointStore, disk: Disk) -> None:
    writer = BackgroundWriter()
    assert not writer.busy
    writer.begin(store, snapshot_at(5), on_failure=nothing)
    assert writer.busy
    assert (writer.take(), writer.failure) == (None, None)
    assert CheckpointStore(store.folder.parent, keep=2).latest() is None  # nothing counts yet
    disk.goes_on.set()
    until(lambda: not writer.busy)
    latest = CheckpointStore(store.folder.parent, keep=2).latest()
    assert latest is not None
    assert latest.step == 5
    saved = writer.take()
    assert saved is not None
    assert (saved.step, saved.path, saved.bytes, saved.words) == (5, store.path(latest), latest.bytes, ())
    assert saved.published <= time.monotonic()
    assert writer.take() is None


def test_nothing_of_the_copy_is_held_after_the_write(store: CheckpointStore) -> None:
    writer = BackgroundWriter()
    snapshot = snapshot_at(1)
    tensor = weakref.ref(snapshot.adapter[NAME])
    writer.begin(store, snapshot, on_failure=nothing)
    del snapshot
    writer.wait(nothing)
    gc.collect()
    assert tensor() is None
    assert writer.take() is not None


def test_who_waits_moves_only_as_the_write_does(store: CheckpointStore, disk: Disk) -> None:
    """Else a disk that hangs could not be told from one that is slow."""
    writer = BackgroundWriter()
    moves: list[float] = []
    writer.begin(store, snapshot_at(1), on_failure=nothing)
    waiting = threading.Thread(target=writer.wait, args=(lambda: moves.append(time.monotonic()),), daemon=True)
    waiting.start()
    until(lambda: bool(moves))  # the first tensor went to the page cache
    time.sleep(0.1)
    seen = len(moves)
    time.sleep(0.5)
    assert (len(moves), waiting.is_alive()) == (seen, True)
    disk.goes_on.set()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert len(moves) > seen
    assert writer.take() is not None


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(store: CheckpointStore, disk: Disk) -> None:
    disk.goes_on.set()
    writer = BackgroundWriter()
    writer.begin(store, snapshot_at(1), on_failure=nothing)
    writer.wait(nothing)
    assert writer.take() is not None

    disk.errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    told: list[bool] = []
    writer.begin(store, snapshot_at(2), on_failure=lambda: told.append(writer.busy))
    writer.wait(nothing)
    assert told == [False]
    assert writer.take() is None
    failure = writer.failure
    assert failure is not None
    assert failure.exit_code is ExitCode.STORAGE
    assert str(failure).startswith(f"the checkpoint of step 2 was not written to {store.folder}/step-00000002-")
    assert "No space left on device" in str(failure)
    assert "still usable: the checkpoint of step 1" in str(failure)
    assert disk.errors == []  # what the disk refuses is not tried again
    assert [path.name[:13] for path in store.folder.glob("step-*")] == ["step-00000001"]


def test_what_may_pass_is_tried_once_more(store: CheckpointStore, disk: Disk) -> None:
    disk.goes_on.set()
    disk.errors = [MemoryError("for a moment")]
    writer = BackgroundWriter()
    writer.begin(store, snapshot_at(3), on_failure=nothing)
    writer.wait(nothing)
    saved = writer.take()
    assert saved is not None
    assert writer.failure is None
    assert [path.name for path in store.folder.glob("step-*")] == [saved.path.name]


def test_what_fails_twice_is_a_failure(store: CheckpointStore, disk: Disk) -> None:
    disk.goes_on.set()
    disk.errors = [MemoryError("first"), MemoryError("second")]
    told: list[str] = []
    writer = BackgroundWriter()
    writer.begin(store, snapshot_at(3), on_failure=lambda: told.append("failed"))
    writer.wait(nothing)
    assert told == ["failed"]
    words = "the checkpoint of step 3 could not be written, twice: MemoryError: second"
    assert str(writer.failure).startswith(words)
    assert list(store.folder.glob("step-*")) == []
