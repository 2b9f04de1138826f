"""Real runs on a GPU of what no CPU can show: 8-bit optimizer state, and fp16 with its loss scale.

Two ranks share the card over gloo where a profile needs two. The package must be installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import ROOT, Finished, config_of, launch, launch_bare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 8
STOPPED_AT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def wide_llama_dir(tiny_tokenizer: Any, folder: Path) -> Path:
    """A seeded Llama of two layers, wide enough that bitsandbytes keeps the state of every LoRA matrix in 8 bits.

    With r = 128 each matrix has at least 131,072 elements: 4,096 are needed for 8 bits, 100,000 for paging.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / "wide-llama")
    tiny_tokenizer.save_pretrained(folder / "wide-llama")
    return folder / "wide-llama"


def _config(model: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    chosen = {
        "training__max_steps": STEPS,
        "training__learning_rate": 2e-4,
        "training__logging_steps": 1,
        "output__name": name,
        **changes,
    }
    return config_of(model, folder, **chosen)


@pytest.mark.parametrize(("optim", "profile", "ranks"), [("adamw_8bit", "ddp", 2), ("paged_adamw_8bit", "single", 1)])
def test_eight_bit_state_is_saved_raw_and_resumes(
    optim: str, profile: str, ranks: int, wide_llama_dir: Path, folder: Path
) -> None:
    changes = {"training__optim": optim, "lora__r": 128, "output__save_steps": STOPPED_AT}
    where = {"profile": profile, "ranks": ranks, "device": "cuda"}
    config = _config(wide_llama_dir, folder, f"{optim}-whole", **changes)
    whole = launch(config, folder, **where)
    assert whole.status == 0, whole.output
    config = _config(wide_llama_dir, folder, f"{optim}-stopped", oom__max_respawns=0, **changes)
    kill = f"rank={ranks - 1},step={STOPPED_AT + 2},phase=forward,kind=sigkill"
    stopped = launch(config, folder, inject=(kill,), **where)
    assert stopped.status == 5, stopped.output
    (checkpoint,) = (stopped.run_dir / "checkpoints").glob(f"step-{STOPPED_AT:08d}-*")
    moments = stopped.tensors(checkpoint / "optimizer.safetensors")
    raw = {tensor.dtype for name, tensor in moments.items() if name.startswith(("state1/", "state2/"))}
    assert [str(dtype) for dtype in raw] == ["torch.uint8"]

    shutil.copytree(stopped.run_dir, folder / "runs" / f"{optim}-resumed")
    config = _config(wide_llama_dir, folder, f"{optim}-resumed", **changes)
    resumed = launch(config, folder, more=("--resume", "must"), **where)
    assert resumed.status == 0, resumed.output
    assert resumed.committed() == whole.committed()
    assert _second_half(resumed) == pytest.approx(whole.losses()[STOPPED_AT:], rel=1e-3)
    assert whole.losses()[-1] < whole.losses()[0]


def _second_half(resumed: Finished) -> list[float]:
    return [event["loss"] for event in resumed.events("step") if event["launch"] == 2]


def _half(profile: str, folder: Path) -> str:
    """The path, without its ending, of a copy of a shipped profile that says fp16."""
    content = yaml.safe_load((ROOT / f"profiles/{profile}.yaml").read_text(encoding="utf-8"))
    copy = folder / f"half-{profile}.yaml"
    copy.write_text(yaml.safe_dump({**content, "mixed_precision": "fp16"}), encoding="utf-8")
    return str(copy.with_suffix(""))


@pytest.fixture(scope="module")
def in_bf16(tiny_llama_dir: Path, folder: Path) -> Finished:
    config = _config(tiny_llama_dir, folder, "bf16")
    run = launch(config, folder, profile="single", ranks=1, device="cuda")
    assert run.status == 0, run.output
    return run


@pytest.mark.parametrize(("profile", "ranks"), [("single", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp", 2)])
def test_fp16_gives_the_losses_of_bf16(
    profile: str, ranks: int, in_bf16: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = _config(tiny_llama_dir, folder, f"fp16-{profile}")
    chosen = f"{_half(profile, folder)}.yaml"
    run = launch(config, folder, profile=chosen, ranks=ranks, device="cuda")
    assert run.status == 0, run.output
    assert "compute fp16" in run.output
    assert not run.events("skipped_step"), run.events("skipped_step")
    assert run.committed() == in_bf16.committed()
    assert run.losses() == pytest.approx(in_bf16.losses(), rel=5e-3)
    norms, expected = ([event["grad_norm"] for event in of.events("log")] for of in (run, in_bf16))
    assert norms == pytest.approx(expected, rel=3e-2)


def test_a_step_that_overflows_in_fp16_consumes_its_samples(
    in_bf16: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = _config(tiny_llama_dir, folder, "overflow")
    observe = {"loss_scale": 2.0**24}
    run = launch_bare(config, folder, profile=_half("ddp", folder), ranks=2, observe=observe, device="cuda")
    assert run.status == 0, run.output
    skipped = [event["step"] for event in run.events("skipped_step")]
    assert 0 < len(skipped) < STEPS
    assert skipped == list(range(1, len(skipped) + 1))
    assert [event["step"] for event in run.events("skipped_step", rank=1)] == skipped
    assert run.committed() == in_bf16.committed()
    assert f"loss scale is now {2.0 ** (24 - len(skipped)):g}" in run.output
