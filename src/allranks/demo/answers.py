"""What the model answers, with nothing but transformers, bitsandbytes and PEFT: as any user of the adapter would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allranks.demo.instructions import Instruction

_MOST_NEW_TOKENS = 60


def load_base(model_dir: Path, device: str) -> tuple[Any, Any]:
    """The model in 4 bits as the run quantises it (NF4, double quantisation), and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=quantization, dtype=dtype, device_map={"": device}
    )
    return model.eval(), AutoTokenizer.from_pretrained(model_dir)


def with_adapter(base: Any, adapter_dir: Path) -> Any:
    """`base` with the adapter in that folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, adapter_dir).eval()


def replies(model: Any, tokenizer: Any, samples: Sequence[Instruction]) -> list[str]:
    """The greedy answer to each question, at most 60 tokens."""
    texts = []
    for sample in samples:
        prompt = tokenizer.apply_chat_template(
            sample.messages()[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        tokens = model.generate(**prompt, max_new_tokens=_MOST_NEW_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return texts
