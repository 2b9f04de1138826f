"""Ranks that run out of memory: all shrink together, nothing is lost or repeated, the adapter is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import Finished, config_of, launch

pytestmark = pytest.mark.timeout(300)

ONE = ("rank=1,step=3,phase=backward,kind=alloc",)
THREE = (
    "rank=1,step=2,phase=forward,kind=oom",
    "rank=0,step=5,phase=backward,kind=alloc",
    "rank=1,step=8,phase=forward,kind=alloc",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oom")


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(config_of(tiny_llama_dir, folder, output__name="undisturbed"), folder, profile="ddp", ranks=2)
    assert run.status == 0, run.output
    return run


def _update(run: Finished) -> torch.Tensor:
    tensors = run.tensors("adapter/adapter_model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if "lora_B" in name])


def _audit(run: Finished, ranks: int) -> None:
    """Per committed step, the samples that the ranks really took are the global batch: none lost, none twice."""
    taken: dict[int, list[int]] = {}
    for rank in range(ranks):
        for event in run.events("step", rank):
            taken.setdefault(event["step"], []).extend(i for micro in event["micro_batches"] for i in micro)
    planned = run.committed()
    assert sorted(taken) == sorted(planned) == list(range(1, 11))
    for step, ids in planned.items():
        assert sorted(taken[step]) == sorted(ids), f"step {step}"


@pytest.mark.parametrize(
    ("profile", "inject"),
    # Of the first, continuous integration has a cell of the failure matrix that asserts the same.
    [pytest.param("ddp", ONE, marks=pytest.mark.nightly), ("ddp", THREE), ("zero2", THREE)],
)
def test_the_run_goes_on_with_the_same_samples_and_adapter(
    profile: str, inject: tuple[str, ...], undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = config_of(tiny_llama_dir, folder, output__name=f"{profile}-{len(inject)}")
    run = launch(config, folder, profile=profile, ranks=2, inject=inject)
    assert run.status == 0, run.output
    assert run.committed() == undisturbed.committed()
    _audit(run, ranks=2)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
    assert float((_update(run) - _update(undisturbed)).norm() / _update(undisturbed).norm()) < 2e-2
    assert len(run.events("retry")) == len(inject)
    caps = [event["caps"][0] for event in run.events("step")]
    assert caps[0] == 4
    assert caps[-1] < 4
    assert caps == sorted(caps, reverse=True)
    # Both ranks shrank in the same step to the same caps.
    assert [e["caps"] for e in run.events("step", 0)] == [e["caps"] for e in run.events("step", 1)]


def test_single_process_recovers_too(undisturbed: Finished, tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="single-1")
    run = launch(config, folder, profile="single", ranks=1, inject=("rank=0,step=3,phase=forward,kind=alloc",))
    assert run.status == 0, run.output
    assert run.committed() == undisturbed.committed()
    _audit(run, ranks=1)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)


def test_at_one_sample_all_ranks_stop_with_one_message(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="floor")
    run = launch(config, folder, profile="ddp", ranks=2, inject=("rank=1,step=2,phase=backward,kind=oom,times=9",))
    assert run.status == 3, run.output
    assert run.verdict["reason"] == "out_of_memory"
    assert run.verdict["step"] == 1
    assert "micro-batch of 1 sample" in run.verdict["message"]
    assert "data.max_length" in run.verdict["message"]
    assert len(run.events("retry")) == 2


@pytest.mark.parametrize(
    ("profile", "phase"),
    [
        ("zero3", "forward"),
        pytest.param("fsdp", "backward", marks=pytest.mark.nightly),
        pytest.param("zero3", "backward", marks=pytest.mark.nightly),
        pytest.param("fsdp", "forward", marks=pytest.mark.nightly),
    ],
)
def test_without_restarts_profiles_with_collectives_in_the_step_stop_cleanly(
    profile: str, phase: str, tiny_llama_dir: Path, folder: Path
) -> None:
    config = config_of(
        tiny_llama_dir, folder, output__name=f"{profile}-{phase}", oom__stop_timeout_s=20, oom__max_respawns=0
    )
    run = launch(config, folder, profile=profile, ranks=2, inject=(f"rank=1,step=2,phase={phase},kind=alloc",))
    assert run.status == 3, run.output
    assert run.verdict["reason"] == "out_of_memory"
    assert "rank 1" in run.verdict["message"]
    assert "rank lost" not in run.output
    failed = run.events("failure", 1)[0]["time"]
    assert run.events("stop", 0)[0]["time"] - failed < 20


def test_nan_names_step_and_samples(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="nan")
    run = launch(config, folder, profile="ddp", ranks=2, inject=("rank=1,step=3,phase=forward,kind=nan",))
    assert run.status == 4, run.output
    assert run.verdict["reason"] == "not_finite"
    assert "step 3" in run.verdict["message"]
    assert "samples [" in run.verdict["message"]


def test_a_fault_that_is_no_memory_fault_is_retried_once_then_stops(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="mismatch")
    run = launch(config, folder, profile="ddp", ranks=2, inject=("rank=0,step=2,phase=forward,kind=error,times=2",))
    assert run.status == 1, run.output
    assert "not a memory fault" in run.verdict["message"]
    assert len(run.events("retry")) == 1


def test_without_restarts_a_failure_in_the_reduction_ends_all_ranks(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="reduce", oom__stop_timeout_s=20, oom__max_respawns=0)
    run = launch(config, folder, profile="ddp", ranks=2, inject=("rank=1,step=2,phase=reduce,kind=oom",))
    assert run.status == 3, run.output
    assert "rank 1" in run.verdict["message"]


def test_evaluation_and_save_are_attempts_of_their_own(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(
        tiny_llama_dir,
        folder,
        output__name="eval-save",
        output__save_steps=3,
        training__max_steps=4,
        training__eval_steps=3,
        training__per_device_eval_batch_size=8,
        data__eval=str(folder / "eval.jsonl"),
    )
    faults = ("rank=1,step=3,phase=eval,kind=oom", "rank=0,step=3,phase=save,kind=alloc")
    run = launch(config, folder, profile="ddp", ranks=2, inject=faults)
    assert run.status == 0, run.output
    retries = [(event["phase"], event["caps"][0]) for event in run.events("retry")]
    assert [phase for phase, _ in retries] == ["eval", "save"]
    assert retries[0][1] < 8
    assert retries[1][1] == 4
    assert [event["samples"] for event in run.events("eval")] == [11, 11]
    assert [event["step"] for event in run.events("save")] == [3, 4]
    assert all(event["caps"][0] == 4 for event in run.events("step"))
