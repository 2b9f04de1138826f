from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from allranks.coordinator.attempt import AttemptKey, FailureFlag
from allranks.coordinator.failure import StoppedEarly

KEY = AttemptKey(launch=1, generation=0, step=7, phase="step", attempt=0)


def becomes_true(flag: FailureFlag, key: AttemptKey, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while not flag.is_raised(key):
        if time.monotonic() > until:
            return False
    return True


def test_a_flag_is_seen_by_another_client_for_its_own_attempt_only() -> None:
    store = dist.HashStore()
    mine, peers = FailureFlag(world_size=2, store=store), FailureFlag(world_size=2, store=store)
    assert not peers.is_raised(KEY)
    mine.raise_flag(KEY)
    assert becomes_true(peers, KEY)
    with pytest.raises(StoppedEarly):
        peers.leave_if_raised(KEY)
    for other in (
        replace(KEY, attempt=1),
        replace(KEY, step=8),
        replace(KEY, phase="eval"),
        replace(KEY, launch=2),
        replace(KEY, generation=1),
    ):
        assert not becomes_true(peers, other, within_s=0.05)
        peers.leave_if_raised(other)
    mine.close()
    peers.close()


def test_one_rank_needs_no_store() -> None:
    flag = FailureFlag(world_size=1)
    flag.raise_flag(KEY)
    assert not flag.is_raised(KEY)
    flag.close()


class FrozenStore:
    """A store whose server does not answer until it is thawed."""

    def __init__(self) -> None:
        self.thawed = threading.Event()
        self.asked = 0

    def clone(self) -> FrozenStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.thawed.wait()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.thawed.wait()
        return True


def test_a_frozen_store_holds_no_rank_up_and_its_late_answer_counts() -> None:
    store = FrozenStore()
    flag = FailureFlag(world_size=2, store=store)
    begun = time.monotonic()
    assert not any(flag.is_raised(KEY) for _ in range(20))
    flag.raise_flag(KEY)
    assert time.monotonic() - begun < flag.RAISE_S + 1.0
    store.thawed.set()
    flag.raise_flag(KEY)
    assert store.asked == 1, "questions do not pile up behind the one that has no answer"
    assert becomes_true(flag, KEY)
    flag.close()


class GoneStore(FrozenStore):
    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection was likely closed")


def test_a_store_that_is_gone_makes_ranks_leave_for_the_vote() -> None:
    flag = FailureFlag(world_size=2, store=GoneStore())
    assert becomes_true(flag, KEY)
    flag.close()
