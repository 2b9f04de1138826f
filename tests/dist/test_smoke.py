"""`allranks run --smoke` as the README has it: two ranks, three steps, an evaluation, a save, an adapter for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runs import config_of, launch


@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_smoke_run_on_two_ranks(tiny_llama_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = config_of(tiny_llama_dir, tmp_path, data__eval=str(tmp_path / "eval.jsonl"), output__name="readme")
    run = launch(config, tmp_path, profile="zero2", ranks=2, more=("--smoke",))
    assert run.status == 0, run.output
    assert not run.run_dir.exists()  # the real run's directory is left alone

    smoke = type(run)(run_dir=run.run_dir.with_name("readme-smoke"), status=0, output="")
    assert smoke.verdict["reason"] == "finished"
    assert [len(ids) for ids in smoke.committed().values()] == [8, 8, 8]
    assert [event["samples"] for event in smoke.events("eval")] == [11]
    assert len(smoke.events("save")) == 1

    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    prompt = tiny_tokenizer("1:red", return_tensors="pt")
    with torch.no_grad():
        before = base(**prompt).logits
        after = PeftModel.from_pretrained(base, smoke.run_dir / "adapter")(**prompt).logits
    assert not torch.equal(before, after)
