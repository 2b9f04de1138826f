"""The ladder of attention kernels, and that each rung computes the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
)

from allranks.config.schema import DataConfig, ModelConfig, RunConfig
from allranks.data.collate import Collate, ModelInputs, flat_batch
from allranks.data.tokens import Tokens
from allranks.errors import UserError
from allranks.train.attention import FLAT, LADDER, choose_attention, fitting, keeps_samples_apart, pool_at_ends
from allranks.train.loss import split_off_targets, weighted_loss
from allranks.train.model import ModelParts, load_model
from allranks.train.varlen import register_varlen

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LENGTHS = (5, 1, 23, 2, 12)


def _samples() -> list[Tokens]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    return [Tokens(input_ids=of, labels=of) for of in ids]


def _model(kind: Any, config: Any, attention: str, device: torch.device = CPU) -> Any:
    register_varlen()
    torch.manual_seed(0)
    config._attn_implementation = attention
    return kind(config).to(device).eval()


def _loss_and_gradients(model: Any, batches: list[ModelInputs]) -> tuple[float, torch.Tensor]:
    """Of all `batches` together, every sample with another weight."""
    device, total, first = next(model.parameters()).device, 0.0, 1
    for batch in batches:
        count = len(batch["labels"]) if "cu_seq_lens_q" not in batch else len(batch["cu_seq_lens_q"]) - 1
        inputs, targets = split_off_targets(batch, [float(first + place) for place in range(count)], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(**inputs).logits
        loss = weighted_loss(logits, targets)
        loss.backward()
        total, first = total + float(loss), first + count
    return total, torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("rung", "device", "tolerance"),
    [
        ("eager", CPU, 1e-5),
        ("sdpa", CPU, 1e-5),
        ("varlen_attn", CPU, 1e-5),
        *(pytest.param(rung, GPU, 2e-2, marks=pytest.mark.gpu) for rung in ("eager", "sdpa", *FLAT[1:])),
    ],
)
@pytest.mark.parametrize("window", [None, 4])
def test_each_rung_gives_loss_and_gradients_of_fp32_eager_one_by_one(
    rung: str, device: torch.device, tolerance: float, window: int | None
) -> None:
    kind, config = (LlamaForCausalLM, LlamaConfig) if window is None else (MistralForCausalLM, MistralConfig)
    sizes = SIZES if window is None else {**SIZES, "sliding_window": window}
    samples = _samples()
    one_by_one = Collate(pad_token_id=0, flat=False)
    reference = _model(kind, config(**sizes), "eager")
    expected, expected_gradients = 0.0, torch.zeros(())
    for weight, sample in enumerate(samples, 1):
        reference.zero_grad()
        loss, gradients = _loss_and_gradients(reference, [one_by_one([sample])])
        expected, expected_gradients = expected + weight * loss, expected_gradients + weight * gradients
    model = _model(kind, config(**sizes), rung, device)
    found, gradients = _loss_and_gradients(model, [Collate(pad_token_id=0, flat=rung in FLAT)(samples)])
    assert found == pytest.approx(expected, rel=tolerance)
    assert float((gradients - expected_gradients).norm() / expected_gradients.norm()) < tolerance


def test_a_classifier_takes_the_last_token_of_each_sample() -> None:
    samples = [Tokens(input_ids=sample.input_ids, labels=[1]) for sample in _samples()]
    config = LlamaConfig(**SIZES, num_labels=3)
    expected = torch.cat(
        [
            _model(LlamaForSequenceClassification, config, "eager")(input_ids=torch.tensor([sample.input_ids])).logits
            for sample in samples
        ]
    )
    model = _model(LlamaForSequenceClassification, LlamaConfig(**SIZES, num_labels=3), "varlen_attn")
    assert pool_at_ends(model)
    flat = flat_batch(samples, 0)
    assert torch.equal(flat.pop("labels"), torch.ones(5, dtype=torch.int64))  # type: ignore[arg-type]
    torch.testing.assert_close(model(**flat).logits, expected)
    padded = Collate(pad_token_id=0, flat=False)(samples)
    del padded["labels"]
    torch.testing.assert_close(model(**padded).logits, expected)


@pytest.mark.parametrize("classes", [False, True])
def test_a_model_that_keeps_samples_apart_is_told_from_one_that_mixes_them(classes: bool) -> None:
    kind, sizes = (LlamaForSequenceClassification if classes else LlamaForCausalLM), {**SIZES, "num_labels": 3}
    model = _model(kind, LlamaConfig(**sizes), "varlen_attn")
    if classes:
        assert pool_at_ends(model)

    def mixing(inputs: ModelInputs) -> torch.Tensor:
        ids, starts = inputs["input_ids"], inputs["cu_seq_lens_q"]
        assert isinstance(ids, torch.Tensor) and isinstance(starts, torch.Tensor)
        whole = {"cu_seq_lens_q": torch.tensor([0, ids.shape[1]], dtype=torch.int32), "input_ids": ids}
        logits = model(**whole).logits
        return logits.expand(len(starts) - 1, -1) if classes else logits

    assert keeps_samples_apart(lambda inputs: model(**inputs).logits, vocabulary=97, classes=classes, device=CPU)
    assert not keeps_samples_apart(mixing, vocabulary=97, classes=classes, device=CPU)


def test_what_the_kernel_lacks_is_an_error_and_not_another_attention() -> None:
    model = _model(LlamaForCausalLM, LlamaConfig(**SIZES, attention_dropout=0.5), "varlen_attn").train()
    with pytest.raises(UserError, match=r"varlen_attn has no attention_dropout, which this model asks for\n +fix: set"):
        model(**{name: value for name, value in flat_batch(_samples(), 0).items() if name != "labels"})


def test_on_a_cpu_auto_pads_and_says_why() -> None:
    chosen = choose_attention("auto", CPU, "no", {})
    assert (chosen.implementation, chosen.flat) == ("sdpa", False)
    assert chosen.words == ("attention by sdpa (flash_attention_2: needs a GPU; varlen_attn: needs a GPU)",)


@pytest.mark.parametrize(
    ("capability", "precision", "installed", "expected", "word"),
    [
        ((9, 0), "bf16", True, "flash_attention_2", ""),
        ((9, 0), "bf16", False, "varlen_attn", "flash-attn is not installed"),
        ((7, 5), "fp16", True, "sdpa", "needs compute capability 8.0, and this GPU has 7.5"),
        ((9, 0), "no", True, "sdpa", "computes in bf16 or fp16, and the run in fp32"),
    ],
)
def test_auto_takes_the_first_rung_that_works(
    capability: tuple[int, int],
    precision: str,
    installed: bool,
    expected: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: installed)
    chosen = choose_attention("auto", GPU, precision, {})
    assert (chosen.implementation, chosen.flat) == (expected, expected in FLAT)
    assert word in "".join(chosen.words)
    assert bool(chosen.words) == bool(word)


def test_a_rung_that_the_model_refuses_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    chosen = choose_attention("auto", GPU, "bf16", {"flash_attention_2": "X does not support Flash Attention 2"})
    assert chosen.implementation == "varlen_attn"
    assert chosen.words == ("attention by varlen_attn (flash_attention_2: X does not support Flash Attention 2)",)
    with pytest.raises(UserError, match=r"no attention kernel works: .*eager: broken"):
        choose_attention("auto", GPU, "bf16", dict.fromkeys(LADDER, "broken"))


def test_a_kernel_that_was_named_and_does_not_work_is_an_error_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"attn_implementation: flash_attention_2: needs a GPU\n +fix: set .*auto"):
        choose_attention("flash_attention_2", CPU, "no", {})
    assert choose_attention("varlen_attn", CPU, "no", {}).flat


def test_an_architecture_that_takes_no_boundaries_is_padded_with_a_word() -> None:
    class Own(LlamaForCausalLM):
        _supports_attention_backend = False

    model = _model(Own, LlamaConfig(**SIZES), "varlen_attn")
    chosen = fitting(model, choose_attention("varlen_attn", CPU, "no", {}))
    assert (chosen.implementation, chosen.flat, model.config._attn_implementation) == ("sdpa", False, "sdpa")
    [word] = chosen.words
    assert word.startswith("Own can't train without padding by varlen_attn: it has attention layers of its own")
    assert word.endswith("attention by sdpa")


@pytest.mark.parametrize(
    ("kind", "config", "kernel", "word"),
    [
        (Gemma2ForCausalLM, Gemma2Config, "eager", "the kernel has no soft-capped scores; attention by eager"),
        (GptOssForCausalLM, GptOssConfig, "eager", "the kernel has no attention sinks; attention by eager"),
        (
            LlamaForCausalLM,
            partial(LlamaConfig, attention_dropout=0.1),
            "sdpa",
            "the kernel has no dropout of attention weights; attention by sdpa",
        ),
    ],
)
def test_a_model_that_wants_more_than_the_kernel_has_is_padded(kind: Any, config: Any, kernel: str, word: str) -> None:
    model = _model(kind, config(**SIZES), "varlen_attn")
    chosen = fitting(model, choose_attention("varlen_attn", CPU, "no", {}))
    assert (chosen.implementation, chosen.flat, model.config._attn_implementation) == (kernel, False, kernel)
    assert chosen.words[-1].endswith(word)


def test_a_model_without_sdpa_is_loaded_with_the_next_rung_and_says_so(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sizes = {**SIZES, "vocab_size": len(tiny_tokenizer)}
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(tmp_path)

    def load(attention: str) -> ModelParts:
        config = RunConfig(
            model=ModelConfig(name_or_path=str(tmp_path), attn_implementation=attention),  # type: ignore[arg-type]
            data=DataConfig(train="t.jsonl"),
        )
        return load_model(
            config, tokenizer=tiny_tokenizer, profile="single", precision="no", device=CPU, num_labels=None
        )

    parts = load("auto")
    assert (parts.attention.implementation, parts.attention.flat) == ("eager", False)
    [word] = [note for note in parts.notes if note.startswith("attention by eager")]
    assert "sdpa: Gemma2ForCausalLM does not support" in word
    with pytest.raises(UserError, match=r"attn_implementation: sdpa: Gemma2ForCausalLM does not support"):
        load("sdpa")
