"""Micro-batches of one sample that do not fit: gradient checkpointing, then the sample is left out, then a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import Finished, config_of, launch

pytestmark = pytest.mark.timeout(300)

STEPS = 4
SINGLE_SAMPLES = {
    "training__max_steps": STEPS,
    "training__per_device_train_batch_size": 1,
    "training__gradient_checkpointing": False,
    "output__save_steps": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-sample")


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(
        config_of(tiny_llama_dir, folder, output__name="undisturbed", **SINGLE_SAMPLES), folder, profile="ddp", ranks=2
    )
    assert run.status == 0, run.output
    return run


@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_checkpointing_is_raised_then_the_sample_is_left_out(
    profile: str, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = config_of(
        tiny_llama_dir, folder, output__name=f"left-out-{profile}", oom__max_skipped_samples=1, **SINGLE_SAMPLES
    )
    run = launch(config, folder, profile=profile, ranks=2, inject=("rank=1,step=1,phase=backward,kind=oom,times=2",))
    assert run.status == 0, run.output
    decided = run.events("retry" if profile == "ddp" else "respawn")
    assert [event["gradient_checkpointing"] for event in decided] == [True, True]
    first, second = (event["skipped_samples"] for event in decided)
    assert first == []
    assert len(second) == 1

    assert run.committed() == undisturbed.committed(), "what is left out is still consumed"
    assert second[0] in run.committed()[1]
    assert [event["skipped_samples"] for event in run.events("step")] == [second, *[[]] * (STEPS - 1)]
    for step, ids in run.committed().items():
        taken = sorted(
            i
            for rank in range(2)
            for event in run.events("step", rank)
            if event["step"] == step
            for micro in event["micro_batches"]
            for i in micro
        )
        assert taken == sorted(set(ids) - set(second)), f"step {step}"
    assert f"leave sample {second[0]} out" in run.output or "1 sample left out" in run.output


def test_the_same_mathematics_with_checkpointing_raised(
    undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = config_of(tiny_llama_dir, folder, output__name="raised", **SINGLE_SAMPLES)
    run = launch(config, folder, profile="zero2", ranks=2, inject=("rank=0,step=1,phase=forward,kind=oom",))
    assert run.status == 0, run.output
    assert [event["gradient_checkpointing"] for event in run.events("retry")] == [True]
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
