"""A model and a set so small that a run takes seconds: for drills, tests and benchmarks. Weights are random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, longest_tokens: int = 2048) -> Any:
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
        model_max_length=longest_tokens,
    )


def write_tiny_llama(folder: Path) -> None:
    """Save a seeded Llama (2 layers, width 64, 259 tokens) in fp32, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tiny_set(path: Path, *, samples: int, seed: int) -> None:
    """Prompt-completion samples with a long-tailed mix of lengths, as JSON lines."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(samples):
            words = max(1, min(30, int(rng.lognormvariate(1.2, 0.8))))
            completion = " ".join(rng.choice(("red", "blue", "green", "grey")) for _ in range(words))
            file.write(json.dumps({"prompt": f"{number}:", "completion": completion}) + "\n")
