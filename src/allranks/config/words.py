"""Keys that users know from other tools: what each means here, and which key to use instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ForeignWord:
    """A key of another tool.

    Attributes:
        tool: where it comes from.
        instead: what to do here, in the imperative.
        key: dotted path of the key that takes its place, if there is one.
        secret: its value must not be shown.
    """

    tool: str
    instead: str
    key: str | None = None
    secret: bool = False


def _same(tool: str, key: str) -> ForeignWord:
    return ForeignWord(tool=tool, instead=f"use {key}", key=key)


_LOGIN = ForeignWord(
    tool="the hub",
    instead="remove it: log in once with `hf auth login`; a token never goes into a file of the run",
    secret=True,
)
_PROFILE = "remove it: how the model is spread is the profile's: allranks run … --profile "
_PRECISION = "use training.mixed_precision (auto, bf16, fp16 or no)"
_GPUS = ForeignWord(tool="accelerate", instead="remove it: the number of ranks is given by --gpus")

FOREIGN_WORDS: dict[str, ForeignWord] = {
    # vLLM
    "enforce_eager": ForeignWord(
        tool="vLLM", instead="remove it: it turns off CUDA graphs in vLLM's inference, and training here uses none"
    ),
    "gpu_memory_utilization": ForeignWord(
        tool="vLLM", instead="remove it: the ranks shrink their micro-batches together when memory runs out"
    ),
    # DeepSpeed
    "gradient_clipping": _same("DeepSpeed", "training.max_grad_norm"),
    "zero_stage": ForeignWord(tool="DeepSpeed", instead=_PROFILE + "zero2 or zero3"),
    "zero_optimization": ForeignWord(tool="DeepSpeed", instead=_PROFILE + "zero2 or zero3"),
    "deepspeed": ForeignWord(tool="transformers", instead=_PROFILE + "zero2 or zero3"),
    "train_micro_batch_size_per_gpu": _same("DeepSpeed", "training.per_device_train_batch_size"),
    "train_batch_size": _same("DeepSpeed", "training.global_batch_size"),
    # transformers and accelerate
    "fsdp": ForeignWord(tool="transformers", instead=_PROFILE + "fsdp"),
    "fsdp_config": ForeignWord(tool="transformers", instead=_PROFILE + "fsdp"),
    "profile": ForeignWord(
        tool="the command line", instead="remove it: give the profile as allranks run … --profile NAME"
    ),
    "num_processes": _GPUS,
    "gpu_ids": _GPUS,
    "n_gpus": _GPUS,
    "gpus": _GPUS,
    "device_map": ForeignWord(
        tool="transformers",
        instead="remove it: allranks places the model itself, on each rank's own GPU; `auto` would spread every rank's "
        "copy over all GPUs and is refused on several ranks",
    ),
    "load_in_8bit": ForeignWord(
        tool="transformers",
        instead="use quantization.load_in_4bit: true for a 4-bit base, false for the model's own dtype; 8 bits are not "
        "supported",
        key="quantization.load_in_4bit",
    ),
    "quantization_config": ForeignWord(
        tool="transformers", instead="write its fields into the section `quantization`", key="quantization"
    ),
    "use_cache": ForeignWord(
        tool="transformers", instead="remove it: the cache is for generation, and always off in training"
    ),
    **{
        name: ForeignWord(tool="transformers", instead=_PRECISION, key="training.mixed_precision")
        for name in ("torch_dtype", "dtype", "bf16", "fp16", "precision")
    },
    "use_flash_attention_2": _same("transformers", "model.attn_implementation"),
    "model_name_or_path": _same("transformers", "model.name_or_path"),
    "output_dir": _same("transformers", "output.dir"),
    "run_name": _same("transformers", "output.name"),
    "num_epochs": _same("other trainers", "training.num_train_epochs"),
    "epochs": _same("other trainers", "training.num_train_epochs"),
    "batch_size": _same("other trainers", "training.per_device_train_batch_size"),
    "micro_batch_size": _same("Axolotl", "training.per_device_train_batch_size"),
    "eval_batch_size": _same("other trainers", "training.per_device_eval_batch_size"),
    "lr": _same("other trainers", "training.learning_rate"),
    "optimizer": _same("Axolotl", "training.optim"),
    "lr_scheduler": _same("Axolotl", "training.lr_scheduler_type"),
    "warmup_ratio": _same("transformers", "training.warmup_steps"),
    "eval_strategy": _same("transformers", "training.eval_steps"),
    "evaluation_strategy": _same("transformers", "training.eval_steps"),
    "save_strategy": _same("transformers", "output.save_steps"),
    "group_by_length": _same("transformers", "training.group_by_length_window"),
    "train_sampling_strategy": _same("transformers", "training.group_by_length_window"),
    "data_seed": _same("transformers", "training.seed"),
    "auto_find_batch_size": ForeignWord(
        tool="transformers", instead="remove it: all ranks shrink together when one runs out of memory, always"
    ),
    "resume_from_checkpoint": ForeignWord(
        tool="transformers", instead="remove it: allranks run resumes by itself; --resume says how"
    ),
    "report_to": ForeignWord(
        tool="transformers", instead="remove it: every run writes its events into its own folder; see allranks show"
    ),
    "task_type": _same("PEFT", "model.task"),
    "bias": ForeignWord(tool="PEFT", instead="remove it: biases stay frozen"),
    "lora_r": _same("Axolotl", "lora.r"),
    "lora_rank": _same("other trainers", "lora.r"),
    "alpha": _same("other trainers", "lora.lora_alpha"),
    "max_seq_length": _same("TRL", "data.max_length"),
    "max_seq_len": _same("other trainers", "data.max_length"),
    "sequence_len": _same("Axolotl", "data.max_length"),
    "base_model": _same("Axolotl", "model.name_or_path"),
    "dataset": _same("other trainers", "data.train"),
    "datasets": _same("Axolotl", "data.train"),
    "dataset_name": _same("TRL", "data.train"),
    "train_file": _same("transformers", "data.train"),
    "validation_file": _same("transformers", "data.eval"),
    **dict.fromkeys(("token", "hub_token", "hf_token", "use_auth_token", "push_to_hub_token"), _LOGIN),
}


def foreign_word(key: str) -> ForeignWord | None:
    """What `key` is in another tool; hyphens and capitals do not matter."""
    return FOREIGN_WORDS.get(key.replace("-", "_").lower())
