"""A GPU's allocator refuses memory: every profile goes on, from what it measured, and keeps what the memory held.

Two ranks share the card over gloo. The package must be installed.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from allranks.events import read_events
from allranks.lineage import committed
from runs import Finished, config_of, launch, launch_bare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 9
FAULTS = ((1, 3, "forward"), (0, 5, "backward"), (1, 7, "step"))
"""Rank, step and phase."""
IN_PLACE_S = 1.0
"""From the fault to the retry, in the profiles that need not start again."""
SAME_RESERVED = 1.02
GROWN_AFTER = 20
"""Steps without a failure until caps grow for the first time: docs/coordinator.md."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


def _config(model: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    chosen = {"training__max_steps": STEPS, "training__logging_steps": 1, "output__name": name, **changes}
    return config_of(model, folder, **chosen)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(_config(tiny_llama_dir, folder, "undisturbed"), folder, profile="single", ranks=1, device="cuda")
    assert run.status == 0, run.output
    return run


@pytest.mark.parametrize("profile", ["ddp", "zero2", "zero3", "fsdp"])
def test_what_the_allocator_refuses_costs_nothing_but_time(
    profile: str, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = _config(tiny_llama_dir, folder, profile, output__save_steps=2, oom__memory_history=2000)
    faults = tuple(f"rank={rank},step={step},phase={phase},kind=alloc" for rank, step, phase in FAULTS)
    run = launch(config, folder, profile=profile, ranks=2, inject=faults, device="cuda", timeout_s=280)
    assert run.status == 0, run.output
    lineages = [committed(read_events(run.run_dir, rank), "step") for rank in range(2)]
    assert {event["step"]: event["sample_ids"] for event in lineages[0]} == undisturbed.committed()
    assert [event["loss"] for event in lineages[0]] == pytest.approx(undisturbed.losses(), rel=5e-3)
    for mine in zip(*lineages, strict=True):
        taken = [sample for event in mine for micro in event["micro_batches"] for sample in micro]
        assert sorted(taken) == sorted(mine[0]["sample_ids"])

    failures = sorted((e for rank in range(2) for e in run.events("failure", rank)), key=lambda e: e["time"])
    assert [(e["rank"], e["step"], e["phase"]) for e in failures] == list(FAULTS), run.output
    for failure in failures:
        assert failure["failure"] == "cuda_oom"
        assert failure["bytes_asked"] > failure["bytes_free"] > 0, failure
    in_place = profile in ("ddp", "zero2")
    assert [e["step"] for e in run.events("retry")] == ([3, 5] if in_place else [])
    assert [e["step"] for e in run.events("respawn")] == ([7] if in_place else [3, 5, 7])
    _judge_times(run)
    _judge_reserved(run)
    for rank in range(2):
        _judge_snapshot(run.run_dir / f"memory/L0001-rank{rank}.pickle")


def _judge_times(run: Finished) -> None:
    marks = sorted(path.stat().st_mtime for path in (run.run_dir / "injected").glob("L*/*"))
    for number, retry in enumerate(run.events("retry")):
        assert retry["time"] - marks[number] <= IN_PLACE_S, run.output


def _judge_reserved(run: Finished) -> None:
    """Where the processes live on, they hold no more after a fault than before it."""
    reserved = {event["step"]: event["reserved_bytes"] for event in run.events("log")}
    for retry in run.events("retry"):
        before, after = reserved[retry["step"] - 1], reserved[retry["step"] + 1]
        assert all(now <= SAME_RESERVED * then for now, then in zip(after, before, strict=True)), reserved


def _judge_snapshot(file: Path) -> None:
    with file.open("rb") as opened:
        snapshot = pickle.load(opened)
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) > 0
    told = [event for trace in snapshot["device_traces"] for event in trace]
    assert 0 < len(told) <= 2000
    assert any("allranks" in frame["filename"] for event in told for frame in event.get("frames", ()))
    assert "CUDA memory summary" in file.with_suffix(".txt").read_text(encoding="utf-8")


def test_caps_grow_back_from_measured_headroom(tiny_llama_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, folder, "growing", training__max_steps=GROWN_AFTER + 6)
    fault = "rank=1,step=2,phase=backward,kind=alloc"
    run = launch(config, folder, profile="ddp", ranks=2, inject=(fault,), device="cuda")
    assert run.status == 0, run.output
    caps = {event["step"]: event["caps"][0] for event in run.events("step")}
    assert [caps[step] for step in (1, 2, GROWN_AFTER)] == [4, 2, 2]
    (growth,) = run.events("caps")
    assert (growth["reason"], growth["caps"][0]) == ("headroom", 4)
    assert caps[GROWN_AFTER + 6] == 4
    assert growth["message"] in run.output


def test_allocator_retries_shrink_the_caps_before_memory_runs_out(tiny_llama_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, folder, "crowded", training__gradient_checkpointing=False)
    run = launch_bare(config, folder, profile="single", ranks=1, observe={"crowd_bytes": 2**28}, device="cuda")
    assert run.status == 0, run.output
    assert run.events("caps"), run.output
    shrunk = run.events("caps")[0]
    assert (shrunk["reason"], shrunk["caps"][0]) == ("pressure", 3), run.output
    before = shrunk["step"]
    assert 3 <= before < STEPS
    assert [event["caps"][0] for event in run.events("step")][: before + 1] == [4] * before + [3]
    assert not run.events("failure")
