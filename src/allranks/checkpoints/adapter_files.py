"""The adapter as plain PEFT reads it: names of files, keys of tensors, and the check that they fit the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from allranks.errors import UserError

if TYPE_CHECKING:
    import torch

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"


def peft_key(name: str, adapter_name: str = "default") -> str:
    """The key under which PEFT's own files hold the parameter `name` of a PeftModel.

    ``base_model.model.…q_proj.lora_A.default.weight`` → ``…q_proj.lora_A.weight``;
    ``base_model.model.score.modules_to_save.default.weight`` → ``base_model.model.score.weight``.
    """
    key = name.replace(f".modules_to_save.{adapter_name}.", ".")
    return re.sub(rf"\.{re.escape(adapter_name)}(\.[^.]+)?$", r"\1", key)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of trained parameters that several modules of a PeftModel share: further name → first name.

    ``model.named_parameters()`` gives only the first, but PEFT asks for all of them in the file (``lm_head`` beside
    ``embed_tokens`` after ``ensure_weight_tying``).
    """
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def by_peft_key(adapter: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter under PEFT's own keys, the tied ones under each of theirs.

    Raises:
        ValueError: two parameters have the same key: a fault of ours.
    """
    named = {**adapter, **{name: adapter[first] for name, first in tied.items()}}
    keyed = {peft_key(name): tensor for name, tensor in named.items()}
    if len(keyed) != len(named):
        raise ValueError(f"{len(named)} parameters have only {len(keyed)} PEFT keys")
    return keyed


def adapter_config_json(peft_config: Mapping[str, Any]) -> bytes:
    """The content of ``adapter_config.json``: sets as sorted lists, and marked as ready for inference."""
    values = {**peft_config, "inference_mode": True}
    return json.dumps(values, indent=2, sort_keys=True, default=sorted).encode()


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, torch.Tensor], what: str = "adapter"
) -> None:
    """Compare loaded tensors with the names and shapes that the model has.

    Raises:
        UserError: names every tensor that is missing, extra or of another shape.
    """
    lines = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    lines += [f"extra: {name} {list(tensor.shape)}" for name, tensor in found.items() if name not in expected]
    lines += [
        f"other shape: {name} is {list(found[name].shape)} in the checkpoint, {list(shape)} in the model"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    if lines:
        head = f"the checkpoint's {what} does not fit the model: {len(lines)} of its tensors"
        fix = "fix: resume with the model and LoRA keys of the first launch, or start anew with --resume never"
        raise UserError("\n    ".join([head, *lines, fix]))


def check_optimizer(
    expected: Mapping[str, tuple[int, ...]], optimizer: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Compare loaded 32-bit AdamW state with the parameters' names and shapes.

    Raises:
        UserError: names every moment that is missing, extra or of another shape.
    """
    moments = ("exp_avg", "exp_avg_sq")
    check_tensors(
        {f"{moment} of {name}": shape for name, shape in expected.items() for moment in moments},
        {f"{m} of {name}": state[m] for name, state in optimizer.items() for m in moments if m in state},
        what="optimizer state",
    )
