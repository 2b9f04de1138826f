"""A tokenizer with more tokens than the model's embedding has rows: resized on request, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runs import Finished, config_of, launch

pytestmark = pytest.mark.timeout(240)

ADDED = ("<|tool|>", "<|think|>", "<|done|>")
ROWS = 259
EMBEDDING = "base_model.model.model.embed_tokens.weight"
HEAD = "base_model.model.lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resized")


@pytest.fixture(scope="module")
def tokenizer_dir(tiny_llama_dir: Path, folder: Path) -> Path:
    """The tiny model's tokenizer with three tokens more."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    assert len(tokenizer) == ROWS
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)})
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def _config(model: Path, tokenizer: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    config = config_of(
        model,
        folder,
        model__tokenizer_name_or_path=str(tokenizer),
        training__max_steps=3,
        training__learning_rate=1e-2,
        **changes,
    )
    train = folder / "train.jsonl"
    text = train.read_text(encoding="utf-8")
    if ADDED[0] not in text:  # every completion begins with a token that the embedding lacks
        train.write_text(text.replace('"completion": "', f'"completion": "{ADDED[0]}'), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def runs(tiny_llama_dir: Path, tokenizer_dir: Path, folder: Path) -> dict[str, Finished]:
    found = {}
    for profile, ranks in (("single", 1), ("ddp", 2)):
        config = _config(tiny_llama_dir, tokenizer_dir, folder, model__resize_token_embeddings=True)
        run = launch(config, folder, profile=profile, ranks=ranks)
        assert run.status == 0, run.output
        found[profile] = run
    return found


@pytest.mark.parametrize("profile", ["single", "ddp"])
def test_the_embedding_is_trained_saved_and_loaded_by_plain_peft(
    profile: str, runs: dict[str, Finished], tiny_llama_dir: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = runs[profile]
    assert run.verdict["reason"] == "finished"
    word = f"embedding resized from {ROWS} to {ROWS + 3} rows: it is trained and saved with the adapter"
    assert word in run.output
    assert f"base.resize_token_embeddings({ROWS + 3})" in (run.run_dir / "adapter/README.md").read_text()

    saved = run.tensors("adapter/adapter_model.safetensors")
    assert saved[EMBEDDING].shape == saved[HEAD].shape == (ROWS + 3, 64)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    untrained = base.get_input_embeddings().weight.detach()
    # Token "r" is in every sample's colours, and no sample has "z".
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "adapter")
    assert len(tokenizer) == ROWS + 3
    seen, unseen = tokenizer.convert_tokens_to_ids(["r", "z"])
    assert not torch.allclose(saved[EMBEDDING][seen], untrained[seen], atol=1e-4)
    assert torch.equal(saved[EMBEDDING][unseen], untrained[unseen])

    base.resize_token_embeddings(ROWS + 3)
    model = PeftModel.from_pretrained(base, run.run_dir / "adapter")
    assert torch.equal(model.get_input_embeddings().weight, saved[EMBEDDING])
    assert torch.equal(model.get_output_embeddings().weight, saved[HEAD])
    [added] = tokenizer(ADDED[0], add_special_tokens=False)["input_ids"]
    assert added >= ROWS
    with torch.no_grad():
        assert model(torch.tensor([[added, seen]])).logits.shape == (1, 2, ROWS + 3)


def test_two_ranks_train_the_same_embedding_as_one(runs: dict[str, Finished]) -> None:
    assert runs["ddp"].losses() == pytest.approx(runs["single"].losses(), rel=1e-5)
    one, two = (runs[p].tensors("adapter/adapter_model.safetensors") for p in ("single", "ddp"))
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-3)


def test_a_tied_embedding_is_trained_once_and_stays_tied(
    tiny_llama_dir: Path, tokenizer_dir: Path, folder: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    tied = folder / "tied-llama"
    settings = LlamaConfig.from_pretrained(tiny_llama_dir)
    settings.tie_word_embeddings = True
    torch.manual_seed(0)
    LlamaForCausalLM(settings).save_pretrained(tied)
    config = _config(tied, tokenizer_dir, folder, model__resize_token_embeddings=True, output__name="tied")
    run = launch(config, folder, profile="ddp", ranks=2)
    assert run.status == 0, run.output

    saved = run.tensors("adapter/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tied)
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    untrained = base.get_input_embeddings().weight.detach().clone()
    base.resize_token_embeddings(ROWS + 3)
    model = PeftModel.from_pretrained(base, run.run_dir / "adapter")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(embedding, head)
    assert torch.equal(embedding, saved[EMBEDDING])
    # As the head it is trained on every token, so every row has moved.
    moved = (embedding.detach()[:ROWS] - untrained).abs().amax(dim=1)
    assert bool((moved > 1e-3).all())


def test_without_the_flag_it_is_one_clear_error(tiny_llama_dir: Path, tokenizer_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, tokenizer_dir, folder, output__name="refused")
    run = launch(config, folder, profile="ddp", ranks=2)
    assert run.status == 2, run.output
    message = f"the tokenizer has {ROWS + 3} tokens and the model's embedding {ROWS} rows"
    # By the ranks once, by rank 0 alone; then as the reason of the exit code.
    assert run.output.count(f"[rank 0] failure: model: {message}") == 1, run.output
    assert f"exit code 2: failure at step 0: model: {message}" in run.output
    assert run.output.count(message) == 2
    assert "[rank 1]" not in run.output
    assert "set model.resize_token_embeddings: true" in run.output
    assert "Traceback" not in run.output
    assert message in run.verdict["message"]
    assert run.events("step") == []
