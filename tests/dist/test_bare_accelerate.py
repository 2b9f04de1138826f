"""`accelerate launch --config_file profiles/X.yaml -m allranks.train run.yaml`, without our launcher, trains too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from runs import ROOT, config_of, launch_bare

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))


def test_no_shipped_profile_is_left_out() -> None:
    assert PROFILES == ["ddp", "fsdp", "single", "zero2", "zero3"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("profile", PROFILES)
def test_accelerate_alone_trains_with_a_shipped_profile(profile: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ranks = yaml.safe_load((ROOT / "profiles" / f"{profile}.yaml").read_text(encoding="utf-8"))["num_processes"]
    config = config_of(tiny_llama_dir, tmp_path, training__max_steps=3)
    run = launch_bare(config, tmp_path, profile=profile, ranks=ranks, observe={})
    assert run.status == 0, run.output
    assert (run.verdict["reason"], run.verdict["exit_code"], run.verdict["step"]) == ("finished", 0, 3)
    assert [len(ids) for ids in run.committed().values()] == [8, 8, 8]
    [started] = run.events("launch")
    assert (started["profile"], started["world_size"]) == (profile, ranks)
    assert len(list((run.run_dir / "events").iterdir())) == ranks

    off = "started by accelerate itself, not by `allranks run`"
    assert run.output.count(off) == 1, run.output  # said once, not by every rank
    assert any(off in event["message"] and "no care for orphans" in event["message"] for event in run.events("note"))

    ids = torch.arange(40, 60)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run.run_dir / "adapter")
        assert not torch.equal(before, adapted(ids).logits)
    saved = run.tensors("adapter/adapter_model.safetensors")
    loaded = dict(adapted.named_parameters())
    assert len(saved) == 2 * 7 * 2  # A and B of seven projections in two layers
    for name, tensor in saved.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor), name
