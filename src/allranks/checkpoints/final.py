"""What a finished run leaves: the folder ``adapter/`` with adapter, tokenizer and model card, for plain PEFT."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from allranks.checkpoints.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config_json, by_peft_key
from allranks.checkpoints.durable import (
    StorageError,
    fsync_file,
    fsync_folder,
    not_written,
    tensor_file_bytes,
    tensor_file_chunks,
    write_file,
)
from allranks.config.schema import RunConfig
from allranks.plan.plan import Plan
from allranks.units import human_seconds

if TYPE_CHECKING:
    import torch

ADAPTER_DIR = "adapter"
CARD_FILE = "README.md"


def write_adapter(
    run_dir: Path,
    *,
    peft_config: Mapping[str, Any],
    adapter: Mapping[str, torch.Tensor],
    tokenizer: Any,
    card: str,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write ``adapter/`` of a run; an earlier one is replaced once the new one is complete and on the disk.

    Args:
        run_dir: the run directory.
        peft_config: PEFT's `LoraConfig.to_dict`.
        adapter: tensors in host memory by the PeftModel's parameter name, as `CheckpointStore.write` takes them.
        tokenizer: of the run; anything with `save_pretrained`.
        card: text of the model card.
        tied: `tied_names` of the PeftModel.

    Returns:
        The folder, for ``PeftModel.from_pretrained(base, folder)``.

    Raises:
        StorageError: no space, no permission, …; an earlier ``adapter/`` and the checkpoints stay usable.
    """
    final = run_dir / ADAPTER_DIR
    unique = secrets.token_hex(4)
    fresh, replaced = run_dir / f".{ADAPTER_DIR}-{unique}", run_dir / f".{ADAPTER_DIR}-{unique}-replaced"
    weights = by_peft_key(adapter, tied)
    try:
        fresh.mkdir()
        tokenizer.save_pretrained(fresh)
        for path in fresh.rglob("*"):
            if path.is_file():
                fsync_file(path)
        write_file(fresh / ADAPTER_FILE, tensor_file_chunks(weights))
        write_file(fresh / ADAPTER_CONFIG_FILE, [adapter_config_json(peft_config)])
        write_file(fresh / CARD_FILE, [card.encode()])
        fsync_folder(fresh)
        if final.exists():
            final.rename(replaced)
        fresh.rename(final)
        fsync_folder(run_dir)
    except Exception as error:  # whatever it was, the earlier adapter comes back; all but OSError goes on as it is
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        shutil.rmtree(fresh, ignore_errors=True)
        usable = "the last checkpoint" + (" and the earlier adapter" if final.exists() else "")
        if isinstance(error, OSError):
            needed = tensor_file_bytes(weights)
            raise StorageError(not_written("the final adapter", final, needed, error, usable)) from error
        raise
    for left in run_dir.glob(f".{ADAPTER_DIR}-*"):  # the folder replaced just now, and those of killed launches
        shutil.rmtree(left, ignore_errors=True)
    return final


def already_written(
    run_dir: Path, adapter: Mapping[str, torch.Tensor], *, tied: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Whether ``adapter/`` is complete and holds exactly these tensors."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = run_dir / ADAPTER_DIR
    if not all((folder / name).is_file() for name in (ADAPTER_CONFIG_FILE, CARD_FILE)):
        return False
    try:
        found = load((folder / ADAPTER_FILE).read_bytes())
    except (OSError, SafetensorError):
        return False
    wanted = by_peft_key(adapter, tied)
    return found.keys() == wanted.keys() and all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the model card tells about a finished run.

    Attributes:
        steps: committed optimizer steps.
        train_samples: samples in the training set, without the skipped ones.
        max_length: tokens per sample after truncation.
        train_loss: of the last step; None if neither this launch made it nor an earlier one left word of it.
        eval_loss_before: of the base model; None without an evaluation before training.
        eval_loss: of the final adapter; None without an evaluation set.
        wall_s: seconds of training over all launches.
        world_size: ranks of the last launch.
        num_labels: classes, for sequence-classification.
        embedding_rows: rows of the embedding, if it was resized and trained.
        approximate: optimizer state was requantised at a resume.
        versions: of allranks and the libraries beneath it, by name.
    """

    steps: int
    train_samples: int
    max_length: int
    train_loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None
    wall_s: float
    world_size: int
    num_labels: int | None
    embedding_rows: int | None
    approximate: bool
    versions: Mapping[str, str]


def model_card(plan: Plan, outcome: Outcome) -> str:
    """The model card: YAML front matter as the hub reads it, how to load the adapter, and the whole recipe.

    Local absolute paths appear by their last part only.
    """
    import yaml

    base = _portable(plan.config.model.name_or_path)
    causal = plan.config.model.task == "causal-lm"
    compute = "fp32" if plan.mixed_precision == "no" else plan.mixed_precision
    front = {
        "base_model": base,
        "library_name": "peft",
        "pipeline_tag": "text-generation" if causal else "text-classification",
        "tags": ["allranks", "lora", *(["qlora"] if plan.config.quantization.load_in_4bit else [])],
    }
    figures = {
        "optimizer steps": str(outcome.steps),
        "samples per step": str(plan.global_batch_size),
        "training samples": str(outcome.train_samples),
        "max_length": f"{outcome.max_length} tokens",
        "training loss, last step": _loss(outcome.train_loss),
        "evaluation loss, base model": _loss(outcome.eval_loss_before),
        "evaluation loss, this adapter": _loss(outcome.eval_loss),
        "profile": f"{plan.profile_kind} on {outcome.world_size} {plan.device} rank(s), {compute} compute",
        "training time": human_seconds(outcome.wall_s),
        "resume": "approximate: 8-bit optimizer state was requantised for another layout"
        if outcome.approximate
        else None,
    }
    rows = [f"| {name} | {value} |" for name, value in figures.items() if value is not None]
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
            f"# {plan.name}\n",
            f"A LoRA adapter for `{base}`, trained with allranks. From inside this folder:\n",
            f"```python\n{_loading_code(plan, base, outcome)}```\n",
            "## Figures\n\n| | |\n|---|---|",
            *rows,
            f"\n## Recipe\n\n```yaml\n{yaml.safe_dump(_recipe(plan.config), sort_keys=False)}```\n",
            "## Versions\n",
            *(f"- {name} {version}" for name, version in sorted(outcome.versions.items())),
            "",
        ]
    )


def _loss(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.4f}"


def _loading_code(plan: Plan, base: str, outcome: Outcome) -> str:
    model, quantization = plan.config.model, plan.config.quantization
    auto = "AutoModelForCausalLM" if model.task == "causal-lm" else "AutoModelForSequenceClassification"
    arguments = [repr(base)]
    if model.revision is not None:
        arguments.append(f"revision={model.revision!r}")
    if outcome.num_labels is not None:
        arguments.append(f"num_labels={outcome.num_labels}")
    if model.trust_remote_code:
        arguments.append("trust_remote_code=True")
    lines = ["from peft import PeftModel"]
    names = [auto, "AutoTokenizer", *(["BitsAndBytesConfig"] if quantization.load_in_4bit else [])]
    lines += [f"from transformers import {', '.join(names)}", ""]
    if quantization.load_in_4bit:
        dtypes = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
        compute = quantization.bnb_4bit_compute_dtype.replace("auto", dtypes[plan.mixed_precision])
        lines += [
            "quantization = BitsAndBytesConfig(  # as in training",
            "    load_in_4bit=True,",
            f"    bnb_4bit_quant_type={quantization.bnb_4bit_quant_type!r},",
            f"    bnb_4bit_use_double_quant={quantization.bnb_4bit_use_double_quant},",
            f"    bnb_4bit_compute_dtype={compute!r},",
            ")",
        ]
        arguments.append("quantization_config=quantization")
    lines.append(f"base = {auto}.from_pretrained({', '.join(arguments)})")
    if outcome.embedding_rows is not None:
        lines.append(f"base.resize_token_embeddings({outcome.embedding_rows})  # the trained rows are in the adapter")
    lines += ['tokenizer = AutoTokenizer.from_pretrained(".")', 'model = PeftModel.from_pretrained(base, ".")', ""]
    return "\n".join(lines)


def _recipe(config: RunConfig) -> dict[str, Any]:
    recipe = config.model_dump(include={"model", "quantization", "lora", "data", "training"})
    for section, key in (
        ("model", "name_or_path"),
        ("model", "tokenizer_name_or_path"),
        ("data", "train"),
        ("data", "eval"),
    ):
        if recipe[section][key] is not None:
            recipe[section][key] = _portable(recipe[section][key])
    return recipe


def _portable(name_or_path: str) -> str:
    """A hub id or relative path as it is, of a local absolute path the last part."""
    local = Path(name_or_path).is_absolute() or name_or_path.startswith("~")
    return Path(name_or_path).name if local else name_or_path
