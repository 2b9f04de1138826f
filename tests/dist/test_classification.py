"""Sequence classification on two ranks: adapter and head are trained, and plain PEFT gives the logits of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runs import Finished, classifier_config, launch, launch_bare

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@pytest.fixture(scope="module")
def ddp(tiny_llama_dir: Path, folder: Path) -> tuple[Finished, dict[str, torch.Tensor]]:
    logits = folder / "logits.safetensors"
    config = classifier_config(tiny_llama_dir, folder, output__name="ddp")
    run = launch_bare(config, folder, profile="ddp", ranks=2, observe={"logits": str(logits)})
    assert run.status == 0, run.output
    from safetensors.torch import load_file

    return run, load_file(logits)


def test_it_trains_and_every_sample_is_evaluated_once(ddp: tuple[Finished, dict[str, torch.Tensor]]) -> None:
    run, _ = ddp
    assert run.verdict["reason"] == "finished"
    assert [len(ids) for ids in run.committed().values()] == [8] * 6
    assert [event["target_tokens"] for event in run.events("step", 0)] != [8] * 6  # a rank has a part of the samples
    for mine, theirs in zip(run.events("step", 0), run.events("step", 1), strict=True):
        assert mine["target_tokens"] + theirs["target_tokens"] == 8
    before, after = run.events("eval")
    assert (before["samples"], after["samples"]) == (13, 13)
    assert after["loss"] < before["loss"]


def test_the_preset_adapts_two_projections_and_the_head_is_trained_and_saved(
    ddp: tuple[Finished, dict[str, torch.Tensor]],
) -> None:
    run, _ = ddp
    adapter = json.loads((run.run_dir / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(adapter["target_modules"]) == ["q_proj", "v_proj"]
    assert adapter["task_type"] == "SEQ_CLS"
    saved = run.tensors("adapter/adapter_model.safetensors")
    head = saved.pop("base_model.model.score.weight")
    assert head.shape == (3, 64)
    assert len(saved) == 2 * 2 * 2
    assert all(".q_proj.lora_" in name or ".v_proj.lora_" in name for name in saved)
    assert all(tensor.abs().sum() > 0 for name, tensor in saved.items() if "lora_B" in name)


def test_plain_peft_gives_the_logits_of_the_run(
    ddp: tuple[Finished, dict[str, torch.Tensor]], tiny_llama_dir: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    run, logits = ddp
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny_llama_dir, num_labels=3, quantization_config=quantization, dtype=torch.float32, device_map={"": "cpu"}
    )
    for module in base.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # bitsandbytes would evaluate in bf16 on CPUs that have it
    model = PeftModel.from_pretrained(base, run.run_dir / "adapter").eval()
    with torch.no_grad():
        found = model(input_ids=logits["input_ids"], attention_mask=logits["attention_mask"]).logits
    assert found.shape == (1, 3)
    torch.testing.assert_close(found, logits["logits"], rtol=0, atol=1e-6)
    with torch.no_grad(), model.disable_adapter():
        bare = model(input_ids=logits["input_ids"], attention_mask=logits["attention_mask"]).logits
    assert (bare - found).abs().max() > 1e-3


def test_single_gives_the_same_classifier(
    ddp: tuple[Finished, dict[str, torch.Tensor]], tiny_llama_dir: Path, folder: Path
) -> None:
    expected, _ = ddp
    run = launch(classifier_config(tiny_llama_dir, folder, output__name="single"), folder, profile="single", ranks=1)
    assert run.status == 0, run.output
    assert run.losses() == pytest.approx(expected.losses(), rel=1e-5)
