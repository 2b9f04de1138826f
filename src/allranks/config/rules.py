"""What the keys of a run must be together, beyond each one's own type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from allranks.config.document import shown
from allranks.errors import Problem

Values = Callable[[str], Any]
"""Value of a key by its dotted path, defaults filled in."""


def _evaluation_has_data(get: Values) -> Iterator[Problem]:
    for path in ("training.eval_steps", "training.eval_on_start"):
        if get(path) and get("data.eval") is None:
            yield Problem(
                path=path,
                message=f"{shown(get(path))} asks for evaluations, but there is no evaluation set",
                fix=f"set data.eval, or remove {path}",
            )


def _labels_have_a_head(get: Values) -> Iterator[Problem]:
    if get("model.num_labels") is not None and get("model.task") == "causal-lm":
        yield Problem(
            path="model.num_labels",
            message=f"{get('model.num_labels')} has no meaning for model.task: causal-lm",
            fix="set model.task: sequence-classification, or remove model.num_labels",
        )


def _format_suits_the_task(get: Values) -> Iterator[Problem]:
    task, kind = get("model.task"), get("data.format")
    if kind != "auto" and (kind == "classification") != (task == "sequence-classification"):
        wanted = "classification" if task == "sequence-classification" else "prompt-completion, chat or text"
        yield Problem(
            path="data.format",
            message=f"{shown(kind)} does not suit model.task: {task}",
            fix=f"set data.format to auto, {wanted}; or change model.task",
        )


def _length_is_under_its_cap(get: Values) -> Iterator[Problem]:
    length, cap = get("data.max_length"), get("data.max_length_cap")
    if length != "auto" and length > cap:
        yield Problem(
            path="data.max_length",
            message=f"{length} is above data.max_length_cap, {cap}",
            fix="raise data.max_length_cap, or lower data.max_length",
        )


_FOUR_BIT_DEFAULTS = {
    "quantization.bnb_4bit_quant_type": "nf4",
    "quantization.bnb_4bit_use_double_quant": True,
    "quantization.bnb_4bit_compute_dtype": "auto",
    "quantization.bnb_4bit_quant_storage": "auto",
}


def _four_bit_keys_have_an_effect(get: Values) -> Iterator[Problem]:
    for path, default in _FOUR_BIT_DEFAULTS.items():
        if not get("quantization.load_in_4bit") and get(path) != default:
            yield Problem(
                path=path,
                message=f"{shown(get(path))} has no effect with quantization.load_in_4bit: false",
                fix="remove it, or set quantization.load_in_4bit: true",
            )


def _something_is_adapted(get: Values) -> Iterator[Problem]:
    if get("lora.target_modules") == []:
        yield Problem(
            path="lora.target_modules",
            message="[] adapts no layer",
            choices=("auto", "all-linear"),
            fix="name layers, as in [q_proj, v_proj]",
        )


_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def unfit_file_name(file_name: str) -> list[Problem]:
    """The problem of a run that is called after its file by a name that ``output.name`` would refuse."""
    name = Path(file_name).stem
    if _RUN_NAME.fullmatch(name):
        return []
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "my-run"
    return [
        Problem(
            path="output.name",
            message=f"is not set, and the name of the file, {shown(name)}, is not the name of a run",
            fix=f"set output.name, give --name {safe}, or rename the file: letters, digits, dots, hyphens and "
            "underscores only",
        )
    ]


def _name_is_a_folder_name(get: Values) -> Iterator[Problem]:
    name = get("output.name")
    if name is not None and _RUN_NAME.fullmatch(name) is None:
        yield Problem(
            path="output.name",
            message=f"{shown(name)} is not the name of a run",
            fix="use letters, digits, dots, hyphens and underscores only; folders go into output.dir",
        )


def _layers_are_recomputed(get: Values) -> Iterator[Problem]:
    layers = get("training.gradient_checkpointing_layers")
    if layers is not None and not get("training.gradient_checkpointing"):
        yield Problem(
            path="training.gradient_checkpointing_layers",
            message=f"{layers} has no meaning with training.gradient_checkpointing: false",
            fix="set training.gradient_checkpointing: true, or remove training.gradient_checkpointing_layers",
        )


RULES: tuple[tuple[tuple[str, ...], Callable[[Values], Iterator[Problem]]], ...] = (
    (("training.eval_steps", "training.eval_on_start", "data.eval"), _evaluation_has_data),
    (("model.num_labels", "model.task"), _labels_have_a_head),
    (("data.format", "model.task"), _format_suits_the_task),
    (("data.max_length", "data.max_length_cap"), _length_is_under_its_cap),
    (("quantization.load_in_4bit", *_FOUR_BIT_DEFAULTS), _four_bit_keys_have_an_effect),
    (("lora.target_modules",), _something_is_adapted),
    (("training.gradient_checkpointing_layers", "training.gradient_checkpointing"), _layers_are_recomputed),
    (("output.name",), _name_is_a_folder_name),
)
"""The keys that a rule reads, and the rule; it is left out where one of its keys is wrong by itself."""


def broken_rules(get: Values, wrong: set[str]) -> list[Problem]:
    """The problems between keys.

    Args:
        get: values of the keys.
        wrong: keys that have a problem of their own.
    """
    return [problem for reads, rule in RULES if wrong.isdisjoint(reads) for problem in rule(get)]
