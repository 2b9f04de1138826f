"""The benchmarks themselves, at a shape that CPU ranks bear: do they measure what they say?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def _result(tmp_path: Path, script: str, *words: str) -> dict[str, Any]:
    argv = [sys.executable, str(ROOT / "benchmarks" / script), "--shape", "tiny", *words]
    argv += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "out").glob("*.json")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert result["gpu"] is None
    return result


def test_recovery_counts_what_happened_and_misses_no_sample(tmp_path: Path) -> None:
    words = ("--profiles", "zero2,fsdp", "--faults", "3", "--first", "3", "--apart", "2")
    words += ("--save-steps", "1", "--batch", "4", "--one-by-one")
    runs = {run["profile"]: run for run in _result(tmp_path, "recovery.py", *words)["runs"]}
    for run in runs.values():
        assert (run["exit"], run["failures"]) == (0, 3)
        assert run["samples"] == "each committed step took its global batch exactly once"
    assert (runs["zero2"]["retries"], runs["zero2"]["restarts"]) == (2, 1)
    assert (runs["fsdp"]["retries"], runs["fsdp"]["restarts"]) == (0, 3)
    retry = runs["zero2"]["seconds_from_fault_to_retry"]["forward"]["median"]
    again = runs["fsdp"]["seconds_from_fault_until_a_step_begins_after_a_restart"]["forward"]["median"]
    assert 0 < retry < again


@pytest.mark.parametrize(("profile", "ranks"), [("ddp", 2), ("single", 1)])
def test_overhead_pairs_steps_with_and_without(profile: str, ranks: int, tmp_path: Path) -> None:
    result = _result(tmp_path, "overhead.py", "--profile", profile, "--pairs", "12", "--tokens", "60")
    assert len(result["ranks"]) == ranks
    for rank in result["ranks"].values():
        assert rank["pairs"] >= 12
        assert all(seconds > 0 for seconds in rank["seconds_of_a_step"].values())
        low, high = rank["overhead_percent_confidence_95"]
        assert low <= rank["overhead_percent_median"] <= high
        inside = rank.get("main_thread_in_the_coordinator_percent")
        assert (inside is None) if ranks > 1 else 0 < inside < 50
    votes = result["both_votes"]
    assert (votes is None) if ranks == 1 else (votes["steps"] == 8 and votes["milliseconds_a_step_median"] > 0)


def test_save_cost_tells_what_a_save_adds(tmp_path: Path) -> None:
    result = _result(tmp_path, "save_cost.py", "--turns", "1", "--steps", "26", "--save-steps", "10")
    assert "saves" not in result["without_saves"]
    saves = result["with_saves"]
    assert saves["saves"] == 2
    assert 0 < saves["median_blocked_s"] <= saves["median_save_s"]
    assert saves["checkpoint_bytes"] > 10 * 2**20
