"""The two values of profiles/fsdp.yaml that may say several things reach torch's FSDP on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import ROOT, config_of, launch, launch_bare

pytestmark = pytest.mark.timeout(180)

MODEL = "PeftModelForCausalLM"


def _edited(folder: Path, **changes: Any) -> Path:
    """A copy of the shipped profile with values of `fsdp_config` changed."""
    content = yaml.safe_load((ROOT / "profiles/fsdp.yaml").read_text(encoding="utf-8"))
    assert changes.keys() <= content["fsdp_config"].keys()
    content["fsdp_config"] |= changes
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.mark.parametrize("reshard", [True, False])
def test_layers_are_spread_again_after_forward_as_the_profile_says(
    reshard: bool, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    profile = _edited(
        tmp_path, fsdp_reshard_after_forward=reshard, fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer"
    )
    config = config_of(tiny_llama_dir, tmp_path, output__name="fsdp", training__max_steps=1)
    seen = tmp_path / "sharding.json"
    run = launch_bare(config, tmp_path, profile=str(profile.with_suffix("")), ranks=2, observe={"sharding": str(seen)})
    assert run.status == 0, run.output
    sharding = json.loads(seen.read_text(encoding="utf-8"))
    assert sharding["before"] == {MODEL: [True], "LlamaDecoderLayer": [True, True]}
    assert sharding["after"] == {MODEL: [reshard], "LlamaDecoderLayer": [reshard, reshard]}


def test_another_layer_class_makes_other_units(tiny_llama_dir: Path, tmp_path: Path) -> None:
    profile = _edited(tmp_path, fsdp_transformer_layer_cls_to_wrap="NoSuchLayer,LlamaMLP")
    config = config_of(tiny_llama_dir, tmp_path, output__name="mlp", training__max_steps=1)
    seen = tmp_path / "sharding.json"
    run = launch_bare(config, tmp_path, profile=str(profile.with_suffix("")), ranks=2, observe={"sharding": str(seen)})
    assert run.status == 0, run.output
    assert json.loads(seen.read_text(encoding="utf-8"))["before"] == {MODEL: [True], "LlamaMLP": [True, True]}


def test_a_layer_class_that_the_model_lacks_is_one_clear_error(tiny_llama_dir: Path, tmp_path: Path) -> None:
    profile = _edited(tmp_path, fsdp_transformer_layer_cls_to_wrap="OlmoDecoderLayer")
    config = config_of(tiny_llama_dir, tmp_path, output__name="olmo", training__max_steps=1)
    run = launch(config, tmp_path, profile=str(profile), ranks=2)
    assert run.status == 2, run.output
    message = "fsdp_transformer_layer_cls_to_wrap: the model has no layer of class OlmoDecoderLayer"
    assert run.verdict["message"].startswith(message), run.output
    assert "valid: LlamaDecoderLayer\n" in run.verdict["message"]
    assert "allranks profiles cp fsdp my.yaml" in run.verdict["message"]
    assert f"exit code 2: failure at step 0: {message}" in run.output
    assert "Traceback" not in run.output
