"""Which configurations may go on from a checkpoint, and what else changed. Pure.

A resumed run must take the same samples in the same order and make the same updates as the uninterrupted one. Every
key of `RunConfig` is therefore in exactly one of two tables, each with its reason: `RESUME_KEYS` must be equal,
`FREE_KEYS` may differ.
"""

from __future__ import annotations

from typing import Any

from allranks.config.schema import RunConfig
from allranks.errors import Problem
from allranks.plan.plan import Plan

_LENGTH_REASON = (
    "the learning rate is a function of the step and of the number of all steps "
    "(only lr_scheduler_type constant with an explicit warmup_steps leaves the length free)"
)

RESUME_KEYS: dict[str, str] = {
    "model.name_or_path": "the adapter was trained on this base",
    "model.revision": "the adapter was trained on this base",
    "model.tokenizer_name_or_path": "it turns the text into the tokens that the adapter knows",
    "model.task": "it decides head and loss",
    "model.num_labels": "it is the size of the trained head",
    "model.trust_remote_code": "it decides which code builds the model",
    "model.resize_token_embeddings": "it decides whether the embedding is trained",
    "quantization.load_in_4bit": "the adapter corrects the rounding of this base",
    "quantization.bnb_4bit_quant_type": "the adapter corrects the rounding of this base",
    "quantization.bnb_4bit_use_double_quant": "the adapter corrects the rounding of this base",
    "quantization.bnb_4bit_compute_dtype": "it rounds every product of the base",
    "lora.r": "it is the shape of the adapter",
    "lora.lora_alpha": "it scales what the adapter adds",
    "lora.lora_dropout": "it changes the gradient's distribution",
    "lora.target_modules": "it decides which layers have adapter weights",
    "lora.modules_to_save": "it decides which modules are trained in full",
    "lora.use_rslora": "it scales what the adapter adds",
    "data.train_split": "it decides the samples",
    "data.format": "it decides the tokens of a sample",
    "data.prompt_column": "it decides the tokens of a sample",
    "data.completion_column": "it decides the tokens of a sample",
    "data.messages_column": "it decides the tokens of a sample",
    "data.text_column": "it decides the tokens of a sample",
    "data.label_column": "it decides the targets of a sample",
    "data.completion_only_loss": "it decides the targets of a sample",
    "data.max_length": "it decides the tokens of a sample",
    "data.max_length_cap": "it decides the tokens of a sample",
    "data.max_samples": "it decides the samples",
    "training.num_train_epochs": _LENGTH_REASON,
    "training.max_steps": _LENGTH_REASON,
    "training.global_batch_size": "it is fixed at the first launch and every step takes exactly so many samples",
    "training.learning_rate": "it sizes every update",
    "training.lr_scheduler_type": "it sizes every update",
    "training.warmup_steps": "it sizes every update",
    "training.weight_decay": "it is part of every update",
    "training.adam_beta1": "the saved moments were averaged with it",
    "training.adam_beta2": "the saved moments were averaged with it",
    "training.adam_epsilon": "it is part of every update",
    "training.max_grad_norm": "it is part of every update",
    "training.optim": "the saved optimizer state is of its kind",
    "training.mixed_precision": "it rounds activations and gradients",
    "training.loss_reduction": "it weighs the samples of a step",
    "training.group_by_length_window": "it decides the order of samples",
    "training.seed": "it decides the order of samples",
}
"""Keys that must be equal, with the reason."""

FREE_KEYS: dict[str, str] = {
    "model.attn_implementation": "another kernel, the same mathematics to rounding",
    "quantization.bnb_4bit_quant_storage": "it only packs the same 4-bit values differently, as the profile needs",
    "data.train": "a set may move; the worker compares the fingerprint of its content",
    "data.eval": "evaluation changes no weight",
    "data.eval_split": "evaluation changes no weight",
    "data.on_bad_sample": "it decides whether to start, not which samples are left; the fingerprint is compared",
    "training.per_device_train_batch_size": "a cap: the split of a global batch does not change its gradient",
    "training.gradient_accumulation_steps": "it only sized the global batch at the first launch, and that is kept",
    "training.max_tokens_per_micro_batch": "a cap: the split of a global batch does not change its gradient",
    "training.per_device_eval_batch_size": "evaluation changes no weight",
    "training.loss_kernel": "another kernel, the same mathematics to rounding",
    "training.fit_cost": "the split of a global batch does not change its gradient",
    "training.gradient_checkpointing": "it recomputes the same activations",
    "training.gradient_checkpointing_layers": "it recomputes the same activations",
    "training.logging_steps": "logging changes no weight",
    "training.eval_steps": "evaluation changes no weight",
    "training.eval_on_start": "evaluation changes no weight",
    "oom.max_retries_per_step": "a retry takes the same samples",
    "oom.max_skipped_samples": "what was left out so far stays left out",
    "oom.grow_back": "a larger micro-batch takes the same samples",
    "oom.memory_history": "it only says what a snapshot remembers",
    "oom.max_respawns": "a restart goes on from a checkpoint with the same samples",
    "oom.hang_timeout_s": "it only says when to stop waiting",
    "oom.stop_timeout_s": "it only bounds how long a stop may take",
    "output.dir": "a run directory may move",
    "output.name": "a run directory may move",
    "output.save_steps": "saving changes no weight",
    "output.save_total_limit": "saving changes no weight",
}
"""Keys that may differ, with the reason."""

_NOTED_KEYS = (
    "model.attn_implementation",
    "quantization.bnb_4bit_quant_storage",
    "data.train",
    "training.num_train_epochs",
    "training.max_steps",
    "training.optim",
)


def resume_differences(saved: RunConfig, current: RunConfig, *, recorded_global_batch_size: int) -> list[Problem]:
    """Every difference because of which `current` may not go on from a checkpoint of `saved`.

    Defaults that follow from other keys are compared by their value (``lora_alpha`` is ``2·r``), lists of modules
    without regard to order, and the paged 8-bit optimizer as the plain one: it makes the same updates from the same
    state. The length of the run (``max_steps``, else ``num_train_epochs``) may change only where the learning rate
    does not depend on it: a constant schedule with an explicit ``warmup_steps``.

    Args:
        saved: configuration in the checkpoint's plan.
        current: configuration of this launch.
        recorded_global_batch_size: samples per step that the checkpoint's state records. A key left out keeps it,
            an explicit other value is a difference.

    Returns:
        One problem per key, in the order of the schema; empty if the run may go on.
    """
    before, now = _comparable(saved), _comparable(current)
    before["training.global_batch_size"] = recorded_global_batch_size
    if current.training.global_batch_size is None:
        now["training.global_batch_size"] = recorded_global_batch_size
    ignored = _ignored_length_keys(saved, current)
    return [
        Problem(
            path=key,
            message=f"{_shown(now[key])} now, {_shown(before[key])} in the checkpoint; {RESUME_KEYS[key]}",
            fix=f"set it to {_shown(before[key])}, or start anew: --resume never, or another output.name",
        )
        for key in before
        if key in RESUME_KEYS and key not in ignored and before[key] != now[key]
    ]


def fingerprint_difference(saved: str, current: str) -> Problem | None:
    """The problem of a training set whose tokenised content is not the checkpoint's; None if it is.

    Args:
        saved: `TrainState.fingerprint`.
        current: fingerprint of the set that this launch tokenised.
    """
    if saved == current:
        return None
    return Problem(
        path="data.train",
        message=f"its content has the fingerprint {current} now, {saved} in the checkpoint; "
        "the order of samples is a function of it",
        fix="bring back the file of the first launch, or start anew: --resume never, or another output.name",
    )


def resume_notes(saved: Plan, current: Plan) -> list[str]:
    """What changed since the checkpoint and is allowed to, one line each, for console and event log.

    Samples, their order and the weights at the checkpoint stay exactly the same; the lines are about what changes the
    arithmetic to rounding, about dropout, and about keys that have no effect on a resumed run.
    """
    notes = []
    for what, before, now in (
        ("profile", saved.profile_kind, current.profile_kind),
        ("number of ranks", saved.world_size, current.world_size),
        ("device", saved.device, current.device),
        ("mixed precision", saved.mixed_precision, current.mixed_precision),
    ):
        if before != now:
            notes.append(f"resumed with another {what}: {now}, before {before}")
    old, new = _flat(saved.config), _flat(current.config)
    notes += [
        f"resumed with {key} = {_shown(new[key])}, before {_shown(old[key])}"
        for key in _NOTED_KEYS
        if old[key] != new[key]
    ]
    if current.config.lora.lora_dropout > 0 and _dealt(saved) != _dealt(current):
        notes.append(
            f"with lora.lora_dropout = {current.config.lora.lora_dropout} another split of a step draws other dropout "
            "masks: the losses are from here on the same as before only statistically"
        )
    key = "training.gradient_accumulation_steps"
    if new[key] is not None and new[key] != old[key]:
        notes.append(
            f"{key} = {new[key]} has no effect on a resumed run: a step keeps its {saved.global_batch_size} samples"
        )
    return notes


def _dealt(plan: Plan) -> tuple[object, ...]:
    """What decides how the samples of a step are dealt to ranks and micro-steps."""
    training = plan.config.training
    return (
        plan.profile_kind,
        plan.world_size,
        training.per_device_train_batch_size,
        training.max_tokens_per_micro_batch,
    )


def _ignored_length_keys(saved: RunConfig, current: RunConfig) -> tuple[str, ...]:
    constant = all(
        config.training.lr_scheduler_type == "constant" and config.training.warmup_steps is not None
        for config in (saved, current)
    )
    if constant:
        return ("training.num_train_epochs", "training.max_steps")
    if saved.training.max_steps is not None and current.training.max_steps is not None:
        return ("training.num_train_epochs",)  # max_steps rules the length, whatever the epochs
    return ()


def _comparable(config: RunConfig) -> dict[str, Any]:
    values = _flat(config)
    if config.lora.lora_alpha is None:
        values["lora.lora_alpha"] = 2.0 * config.lora.r
    if not isinstance(config.lora.target_modules, str):
        values["lora.target_modules"] = sorted(set(config.lora.target_modules))
    values["lora.modules_to_save"] = sorted(set(config.lora.modules_to_save))
    values["training.optim"] = config.training.optim.removeprefix("paged_")
    return values


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = config.model_dump()
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r}"
