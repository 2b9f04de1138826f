"""Options and fixtures shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from allranks.data.cache import default_cache_dir
from allranks.demo.model import ensure_smollm2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_configure() -> None:
    # A shell that starts the tests in the background has everything below it ignore Ctrl-C, which some tests send.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests, and multi-process ones but for smoke")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly_asked = "nightly" in str(config.getoption("-m"))
    quick = bool(config.getoption("--quick"))
    dist = Path(__file__).parent / "dist"

    def wanted(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if "nightly" in marks and not nightly_asked:
            return False
        return not quick or "smoke" in marks or not ("slow" in marks or dist in item.path.parents)

    left_out = [item for item in items if not wanted(item)]
    items[:] = [item for item in items if wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A tokenizer of the 256 bytes and three special tokens, with a chat template; pad differs from eos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seeded Llama (2 layers, width 64, 259 tokens) in fp32, with `tiny_tokenizer`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once per machine."""
    return ensure_smollm2(default_cache_dir())
