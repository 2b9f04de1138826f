"""Flat micro-batches in real runs: the losses, evaluations and samples of a padded run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runs import Finished, classifier_config, config_of, launch

pytestmark = [pytest.mark.timeout(200)]

TOLERANCE = 1e-5


def _run(config: dict[str, Any], folder: Path, profile: str, attention: str, *inject: str) -> Finished:
    config["model"]["attn_implementation"] = attention
    config["output"]["name"] = f"{profile}-{attention}"
    run = launch(config, folder, profile=profile, ranks=1 if profile == "single" else 2, inject=inject)
    assert run.status == 0, run.output
    [model] = run.events("model")[-1:]
    assert (model["attention"], model["padding_free"]) == (attention, attention == "varlen_attn")
    return run


def _same(found: Finished, expected: Finished) -> None:
    assert found.committed() == expected.committed()
    assert list({event["step"]: event["loss"] for event in found.events("step")}.values()) == pytest.approx(
        expected.losses(), rel=TOLERANCE
    )
    assert [event["loss"] for event in found.events("eval")] == pytest.approx(
        [event["loss"] for event in expected.events("eval")], rel=TOLERANCE
    )


def test_two_ranks_that_run_out_of_memory_give_the_losses_of_a_padded_run(tiny_llama_dir: Path, tmp_path: Path) -> None:
    changes = {"data__eval": str(tmp_path / "eval.jsonl"), "training__eval_steps": 5}
    expected = _run(config_of(tiny_llama_dir, tmp_path, **changes), tmp_path, "single", "sdpa")
    faults = ("rank=1,step=3,phase=forward,kind=oom", "rank=0,step=5,phase=eval,kind=oom")
    run = _run(config_of(tiny_llama_dir, tmp_path, **changes), tmp_path, "ddp", "varlen_attn", *faults)
    _same(run, expected)
    assert len(run.events("eval")) == 2
    assert [event["phase"] for event in run.events("retry")] == ["step", "eval"]


def test_a_rank_without_samples_has_a_flat_filler(tiny_llama_dir: Path, tmp_path: Path) -> None:
    changes = {"training__global_batch_size": 1, "training__max_steps": 3}
    expected = _run(config_of(tiny_llama_dir, tmp_path, **changes), tmp_path, "single", "sdpa")
    _same(_run(config_of(tiny_llama_dir, tmp_path, **changes), tmp_path, "fsdp", "varlen_attn"), expected)


def test_a_classifier_pools_each_sample_of_a_flat_sequence(tiny_llama_dir: Path, tmp_path: Path) -> None:
    expected = _run(classifier_config(tiny_llama_dir, tmp_path), tmp_path, "single", "sdpa")
    _same(_run(classifier_config(tiny_llama_dir, tmp_path), tmp_path, "ddp", "varlen_attn"), expected)
