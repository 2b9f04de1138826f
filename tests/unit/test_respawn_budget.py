"""Budgets of restarts: counted by cause, double without progress, and never a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.coordinator.kinds import FailureKind
from allranks.coordinator.respawn import Death, Ledger, may_go_on, read_ledger, started, write_ledger
from allranks.errors import ExitCode


def death(kind: FailureKind, committed: int, *, cut: bool = False, phase: str = "forward") -> Death:
    return Death(
        kind=kind, message="rank 1 failed", rank=1, step=committed + 1, phase=phase, committed_step=committed, cut=cut
    )


def test_a_start_is_counted_and_another_launch_begins_anew(tmp_path: Path) -> None:
    assert [started(tmp_path, 1).generation for _ in range(3)] == [0, 1, 2]
    ledger = started(tmp_path, 2)
    assert (ledger.generation, ledger.entries) == (0, ())
    write_ledger(tmp_path, ledger.after(death(FailureKind.KILLED, 4)))
    assert read_ledger(tmp_path) == ledger.after(death(FailureKind.KILLED, 4))
    again = started(tmp_path, 2)
    assert (again.generation, len(again.entries)) == (1, 1)


@pytest.mark.parametrize("text", ["", "{", '{"ledger_version": 99, "launch": 1, "starts": 1, "entries": []}', "[]"])
def test_a_ledger_that_can_not_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "respawns.json").write_text(text)
    assert read_ledger(tmp_path) is None


def test_a_restart_without_progress_counts_double_unless_the_caps_were_cut() -> None:
    ledger = Ledger(launch=1)
    for committed, cut in ((5, False), (5, False), (4, True), (6, False), (0, False)):
        ledger = ledger.after(death(FailureKind.CUDA_OOM, committed, cut=cut))
    assert [entry.weight for entry in ledger.entries] == [1, 2, 1, 1, 2]
    assert ledger.used("memory") == 7
    assert ledger.used("killed") == 0


def test_each_cause_has_its_own_budget() -> None:
    ledger = Ledger(launch=1)
    for committed in range(1, 4):
        for kind in (FailureKind.KILLED, FailureKind.CUDA_OOM, FailureKind.NATIVE_OOM, FailureKind.HOST_KILLED):
            ledger = ledger.after(death(kind, committed, cut=True))
            assert may_go_on(ledger, max_respawns=6) is None
    assert [ledger.used(cause) for cause in ("killed", "memory", "host_memory")] == [3, 6, 3]
    stop = may_go_on(ledger.after(death(FailureKind.CUDA_OOM, 9)), max_respawns=6)
    assert stop is not None
    assert (stop.reason, stop.exit_code) == ("out_of_memory", ExitCode.OUT_OF_MEMORY)
    assert "restart 7 for this cause would use 7 of oom.max_respawns = 6" in stop.message
    stop = may_go_on(ledger.after(death(FailureKind.KILLED, 9)), max_respawns=3)
    assert stop is not None
    assert (stop.reason, stop.exit_code) == ("failure", ExitCode.RANK_LOST)


@pytest.mark.parametrize("kind", [FailureKind.OTHER, FailureKind.SIZE_MISMATCH, FailureKind.DEVICE_ASSERT])
def test_a_fault_that_comes_back_at_the_same_place_stops_at_once(kind: FailureKind) -> None:
    ledger = Ledger(launch=1).after(death(kind, 5))
    assert may_go_on(ledger, max_respawns=10) is None
    elsewhere = ledger.after(death(kind, 5, phase="backward"))
    assert may_go_on(elsewhere, max_respawns=10) is None
    again = may_go_on(ledger.after(death(kind, 5)), max_respawns=10)
    assert again is not None
    assert again.exit_code is ExitCode.CRASH
    assert "it failed twice at the same step" in again.message


@given(
    deaths=st.lists(st.tuples(st.sampled_from(sorted(FailureKind)), st.integers(0, 5), st.booleans()), max_size=60),
    budget=st.integers(1, 5),
)
def test_restarts_are_bounded_whatever_happens(deaths: list[tuple[str, int, bool]], budget: int) -> None:
    ledger, restarts = Ledger(launch=1), 0
    for kind, committed, cut in deaths:
        ledger = ledger.after(death(FailureKind(kind), committed, cut=cut))
        if may_go_on(ledger, max_respawns=budget) is not None:
            break
        restarts += 1
    causes = {entry.death.cause for entry in ledger.entries}
    assert restarts <= budget * len(causes)


def test_the_first_death_counts_once_however_early_it_comes() -> None:
    ledger = Ledger(launch=1).after(death(FailureKind.KILLED, 0))
    assert may_go_on(ledger, max_respawns=1) is None
    assert may_go_on(ledger.after(death(FailureKind.KILLED, 0)), max_respawns=2) is not None
