from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from allranks.checkpoints.adapter_files import tied_names
from allranks.checkpoints.final import Outcome, already_written, model_card, write_adapter
from allranks.checkpoints.store import StorageError
from allranks.config.schema import RunConfig
from allranks.errors import ExitCode
from allranks.plan.plan import Plan

IDS = torch.arange(2, 14).reshape(2, -1)
VOCABULARY = 64


def base_model(cls: Any = LlamaForCausalLM, *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **shape, **changes)
    return cls(config).eval()


def tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    raw = Tokenizer(WordLevel(words, unk_token="w1"))
    raw.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", unk_token="w1")
    made.add_tokens(list(extra))
    return made


def trained(base: Any, **lora: Any) -> Any:
    """A PEFT model whose trained parameters are all away from their start."""
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **lora)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write(run_dir: Path, model: Any, tokens: Any, card: str = "card") -> Path:
    return write_adapter(
        run_dir,
        peft_config=model.peft_config["default"].to_dict(),
        adapter={name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad},
        tokenizer=tokens,
        card=card,
        tied=tied_names(model),
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


# --- the folder ------------------------------------------------------------------------------------------------------


def test_plain_peft_gives_the_same_logits(tmp_path: Path) -> None:
    model = trained(base_model(), task_type="CAUSAL_LM")
    folder = write(tmp_path, model, tokenizer(("extra",)))
    assert folder == tmp_path / "adapter"
    loaded = PeftModel.from_pretrained(base_model(), folder)
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(base_model()), logits(model))
    assert AutoTokenizer.from_pretrained(folder)("w5 extra")["input_ids"] == [5, VOCABULARY]
    assert PeftConfig.from_pretrained(folder).inference_mode
    assert (folder / "README.md").read_text() == "card"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_modules_trained_in_full_are_in_it(tmp_path: Path) -> None:
    def base() -> Any:
        return base_model(LlamaForSequenceClassification, num_labels=3)

    model = trained(base(), task_type="SEQ_CLS", modules_to_save=["score", "norm"])
    loaded = PeftModel.from_pretrained(base(), write(tmp_path, model, tokenizer()))
    assert torch.equal(logits(loaded), logits(model))
    head = loaded.base_model.model.score.modules_to_save["default"].weight
    assert torch.equal(head, model.base_model.model.score.modules_to_save["default"].weight)
    assert not torch.equal(head, base().score.weight)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_resized_and_trained_embedding_is_in_it(tmp_path: Path, tied: bool) -> None:
    def resized() -> Any:
        base = base_model(tie_word_embeddings=tied)
        base.resize_token_embeddings(VOCABULARY + 8)
        return base

    modules = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": tied}
    model = trained(resized(), task_type="CAUSAL_LM", **modules)
    assert bool(tied_names(model)) == tied
    loaded = PeftModel.from_pretrained(resized(), write(tmp_path, model, tokenizer(("new",))))
    assert torch.equal(logits(loaded), logits(model))
    rows = loaded.get_input_embeddings().weight
    assert rows.shape[0] == VOCABULARY + 8
    assert torch.equal(rows, model.get_input_embeddings().weight)


def test_earlier_adapter_is_replaced_whole(tmp_path: Path) -> None:
    first, second = trained(base_model()), trained(base_model(seed=5), modules_to_save=["norm"])
    (write(tmp_path, first, tokenizer()) / "notes.txt").write_text("of the first")
    (tmp_path / ".adapter-00000000").mkdir()  # left by a killed launch
    folder = write(tmp_path, second, tokenizer())
    assert torch.equal(logits(PeftModel.from_pretrained(base_model(seed=5), folder)), logits(second))
    assert not (folder / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("change", ["none", "card", "config", "cut", "other weights", "other shape"])
def test_only_a_complete_folder_with_the_same_tensors_is_already_written(tmp_path: Path, change: str) -> None:
    model = trained(base_model())
    adapter = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert not already_written(tmp_path, adapter)
    folder = write(tmp_path, model, tokenizer())
    if change in ("card", "config"):
        (folder / {"card": "README.md", "config": "adapter_config.json"}[change]).unlink()
    elif change == "cut":
        os.truncate(folder / "adapter_model.safetensors", 1000)
    elif change == "other weights":
        next(iter(adapter.values()))[0, 0] += 1e-6
    elif change == "other shape":
        adapter.popitem()
    assert already_written(tmp_path, adapter) == (change == "none")


def test_token_of_the_hub_is_in_no_file(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", token="hf_secretsecretsecret")
    folder = write(tmp_path, trained(base_model()), loaded)
    assert len(list(folder.iterdir())) >= 5
    for path in folder.iterdir():
        assert b"hf_secret" not in path.read_bytes(), path


def failing(call: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the `at`-th call of a function of `os` report a full disk."""
    real, calls = getattr(os, call), [0]

    def full(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, full)


@pytest.mark.parametrize(("call", "at"), [("mkdir", 1), ("fsync", 1), ("fsync", 4), ("rename", 1), ("rename", 2)])
def test_full_disk_keeps_the_earlier_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    first, second = trained(base_model()), trained(base_model(seed=5))
    write(tmp_path, first, tokenizer())
    with monkeypatch.context() as patched, pytest.raises(StorageError) as caught:
        failing(call, at, patched)
        write(tmp_path, second, tokenizer())
    assert caught.value.exit_code == ExitCode.STORAGE
    text = str(caught.value)
    assert text.startswith(f"the final adapter was not written to {tmp_path / 'adapter'}: No space left on device")
    assert "still usable: the last checkpoint and the earlier adapter" in text
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert torch.equal(logits(PeftModel.from_pretrained(base_model(), tmp_path / "adapter")), logits(first))


def test_full_disk_without_an_earlier_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(StorageError, match="still usable: the last checkpoint\n"):
        failing("fsync", 1, patched)
        write(tmp_path, trained(base_model()), tokenizer())
    assert list(tmp_path.iterdir()) == []


# --- the model card --------------------------------------------------------------------------------------------------


def plan(name_or_path: str = "org/base", **config: Any) -> Plan:
    values = {
        "model": {"name_or_path": name_or_path, **config.pop("model", {})},
        "data": {"train": "train.jsonl", **config.pop("data", {})},
        **config,
    }
    return Plan(
        name="my-run",
        run_dir="/home/someone/runs/my-run",
        config=RunConfig.model_validate(values),
        profile_kind="zero2",
        profile_file="/home/someone/profiles/zero2.yaml",
        profile={},
        world_size=2,
        device="cpu",
        mixed_precision="no",
        global_batch_size=8,
        notes=("profile taken from /home/someone/profiles/zero2.yaml",),
    )


OUTCOME = Outcome(
    steps=120,
    train_samples=480,
    max_length=256,
    train_loss=1.23456,
    eval_loss_before=2.5,
    eval_loss=1.5,
    wall_s=95.0,
    world_size=4,
    num_labels=None,
    embedding_rows=None,
    approximate=False,
    versions={"torch": "2.13.0", "allranks": "0.1.0"},
)


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    loaded = yaml.safe_load(front)
    assert isinstance(loaded, dict)
    return loaded


def test_card_has_what_the_hub_reads() -> None:
    assert front_matter(model_card(plan(), OUTCOME)) == {
        "base_model": "org/base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["allranks", "lora", "qlora"],
    }
    unquantised = plan("base: #1", model={"task": "sequence-classification"}, quantization={"load_in_4bit": False})
    front = front_matter(model_card(unquantised, replace(OUTCOME, num_labels=3)))
    assert front["base_model"] == "base: #1"
    assert front["pipeline_tag"] == "text-classification"
    assert front["tags"] == ["allranks", "lora"]


def test_card_tells_the_recipe_and_the_figures() -> None:
    card = model_card(plan(training={"learning_rate": 1e-3}, lora={"r": 8}), OUTCOME)
    for line in (
        "# my-run",
        "| optimizer steps | 120 |",
        "| samples per step | 8 |",
        "| training samples | 480 |",
        "| max_length | 256 tokens |",
        "| training loss, last step | 1.2346 |",
        "| evaluation loss, base model | 2.5000 |",
        "| evaluation loss, this adapter | 1.5000 |",
        "| profile | zero2 on 4 cpu rank(s), fp32 compute |",
        "| training time | 1 min 35 s |",
        "- allranks 0.1.0",
        "- torch 2.13.0",
    ):
        assert line in card.splitlines(), line
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert recipe["training"]["learning_rate"] == 1e-3
    assert recipe["lora"]["r"] == 8
    assert recipe["data"]["train"] == "train.jsonl"
    assert RunConfig.model_validate(recipe) == plan(training={"learning_rate": 1e-3}, lora={"r": 8}).config


def test_card_leaves_out_what_was_not_measured() -> None:
    card = model_card(plan(), replace(OUTCOME, train_loss=None, eval_loss=None, eval_loss_before=float("nan")))
    assert "evaluation loss" not in card
    assert "training loss" not in card
    assert "nan" not in card
    assert "requantised" not in card
    assert "requantised" in model_card(plan(), replace(OUTCOME, approximate=True))


def test_card_names_no_place_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    monkeypatch.setenv("HOME", "/home/someone")
    local = plan(
        "/home/someone/models/base",
        model={"tokenizer_name_or_path": "~/models/tokenizer"},
        data={"train": "/scratch/secret/train.jsonl", "eval": "~/eval.jsonl"},
        output={"dir": "/scratch/secret/runs"},
    )
    card = model_card(local, OUTCOME)
    assert front_matter(card)["base_model"] == "base"
    assert not re.search(r"someone|secret|scratch|~|hf_", card)
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert recipe["model"]["tokenizer_name_or_path"] == "tokenizer"
    assert (recipe["data"]["train"], recipe["data"]["eval"]) == ("train.jsonl", "eval.jsonl")


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "4-bit"])
def test_code_in_the_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool) -> None:
    base_folder = tmp_path / "base"
    base_model().save_pretrained(base_folder)
    resized = base_model()
    resized.resize_token_embeddings(VOCABULARY + 1)
    model = trained(resized, task_type="CAUSAL_LM", modules_to_save=["embed_tokens", "lm_head"])
    its_plan = plan(str(base_folder), quantization={"load_in_4bit": quantised})
    card = model_card(its_plan, replace(OUTCOME, embedding_rows=VOCABULARY + 1))
    folder = write(tmp_path, model, tokenizer(("new",)), card)
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code.replace("'base'", repr(str(base_folder))), names)
    assert names["tokenizer"]("new")["input_ids"] == [VOCABULARY]
    found = logits(names["model"].eval())
    if quantised:
        assert type(names["model"].base_model.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
        assert torch.nn.functional.cosine_similarity(found.flatten(), logits(model).flatten(), dim=0) > 0.9
    else:
        assert torch.equal(found, logits(model))


def test_classification_code_names_the_classes() -> None:
    classes = plan(model={"task": "sequence-classification", "revision": "v2"}, quantization={"load_in_4bit": False})
    card = model_card(classes, replace(OUTCOME, num_labels=3))
    assert (
        "base = AutoModelForSequenceClassification.from_pretrained('org/base', revision='v2', num_labels=3)"
        in card.splitlines()
    )
