from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.checkpoints.resume import FREE_KEYS, RESUME_KEYS, fingerprint_difference, resume_differences, resume_notes
from allranks.config.schema import RunConfig
from allranks.plan.plan import Plan

BASE: dict[str, dict[str, Any]] = {"model": {"name_or_path": "base"}, "data": {"train": "train.jsonl"}}

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.name_or_path": st.sampled_from(["base", "other/base"]),
    "model.revision": st.sampled_from([None, "main", "v2"]),
    "model.tokenizer_name_or_path": st.sampled_from([None, "tok"]),
    "model.task": st.sampled_from(["causal-lm", "sequence-classification"]),
    "model.num_labels": st.sampled_from([None, 2, 3]),
    "model.trust_remote_code": st.booleans(),
    "model.attn_implementation": st.sampled_from(["auto", "flash_attention_2", "varlen_attn", "sdpa", "eager"]),
    "model.resize_token_embeddings": st.booleans(),
    "quantization.load_in_4bit": st.booleans(),
    "quantization.bnb_4bit_quant_type": st.sampled_from(["nf4", "fp4"]),
    "quantization.bnb_4bit_use_double_quant": st.booleans(),
    "quantization.bnb_4bit_compute_dtype": st.sampled_from(["auto", "bfloat16"]),
    "quantization.bnb_4bit_quant_storage": st.sampled_from(["auto", "uint8"]),
    "lora.r": st.sampled_from([8, 16]),
    "lora.lora_alpha": st.sampled_from([None, 16.0, 32.0]),
    "lora.lora_dropout": st.sampled_from([0.0, 0.05]),
    "lora.target_modules": st.sampled_from(["auto", "all-linear", ["q_proj", "v_proj"], ["v_proj", "q_proj"]]),
    "lora.modules_to_save": st.sampled_from([[], ["a", "b"], ["b", "a"]]),
    "lora.use_rslora": st.booleans(),
    "data.train": st.sampled_from(["train.jsonl", "/elsewhere/train.jsonl"]),
    "data.eval": st.sampled_from([None, "eval.jsonl"]),
    "data.train_split": st.sampled_from(["train", "train_sft"]),
    "data.eval_split": st.sampled_from(["test", "validation"]),
    "data.format": st.sampled_from(["auto", "chat"]),
    "data.prompt_column": st.sampled_from(["prompt", "question"]),
    "data.completion_column": st.sampled_from(["completion", "answer"]),
    "data.messages_column": st.sampled_from(["messages", "turns"]),
    "data.text_column": st.sampled_from(["text", "body"]),
    "data.label_column": st.sampled_from(["label", "class"]),
    "data.completion_only_loss": st.booleans(),
    "data.max_length": st.sampled_from(["auto", 64]),
    "data.max_length_cap": st.sampled_from([4096, 64]),
    "data.on_bad_sample": st.sampled_from(["skip", "refuse"]),
    "data.max_samples": st.sampled_from([None, 100]),
    "training.num_train_epochs": st.sampled_from([1, 3]),
    "training.max_steps": st.sampled_from([None, 10, 20]),
    "training.global_batch_size": st.sampled_from([None, 8, 16]),
    "training.per_device_train_batch_size": st.sampled_from([4, 1]),
    "training.gradient_accumulation_steps": st.sampled_from([None, 2]),
    "training.max_tokens_per_micro_batch": st.sampled_from([None, 1024]),
    "training.per_device_eval_batch_size": st.sampled_from([None, 2]),
    "training.learning_rate": st.sampled_from([2e-4, 1e-4]),
    "training.lr_scheduler_type": st.sampled_from(["cosine", "linear", "constant"]),
    "training.warmup_steps": st.sampled_from([None, 0, 5]),
    "training.weight_decay": st.sampled_from([0.0, 0.1]),
    "training.adam_beta1": st.sampled_from([0.9, 0.8]),
    "training.adam_beta2": st.sampled_from([0.999, 0.95]),
    "training.adam_epsilon": st.sampled_from([1e-8, 1e-6]),
    "training.max_grad_norm": st.sampled_from([1.0, 0.3]),
    "training.optim": st.sampled_from(["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]),
    "training.mixed_precision": st.sampled_from(["auto", "bf16"]),
    "training.gradient_checkpointing": st.booleans(),
    "training.loss_reduction": st.sampled_from(["token", "sample"]),
    "training.group_by_length_window": st.sampled_from([1, 4]),
    "training.seed": st.sampled_from([42, 43]),
    "training.logging_steps": st.sampled_from([1, 10]),
    "training.eval_steps": st.sampled_from([None, 50]),
    "training.eval_on_start": st.booleans(),
    "oom.max_retries_per_step": st.sampled_from([16, 2]),
    "oom.max_skipped_samples": st.sampled_from([0, 3]),
    "training.loss_kernel": st.sampled_from(["auto", "torch", "chunked", "logits"]),
    "training.gradient_checkpointing_layers": st.sampled_from([None, 1, 2]),
    "training.fit_cost": st.sampled_from([True, False]),
    "oom.grow_back": st.sampled_from([True, False]),
    "oom.memory_history": st.sampled_from([0, 1000]),
    "oom.max_respawns": st.sampled_from([10, 0]),
    "oom.hang_timeout_s": st.sampled_from([600.0, None]),
    "oom.stop_timeout_s": st.sampled_from([60.0, 10.0]),
    "output.dir": st.sampled_from(["runs", "elsewhere"]),
    "output.name": st.sampled_from([None, "name"]),
    "output.save_steps": st.sampled_from([50, None]),
    "output.save_total_limit": st.sampled_from([2, 5]),
}
"""Two or more valid values of every key."""

KEYS = sorted(
    f"{section}.{key}" for section, keys in RunConfig.model_validate(BASE).model_dump().items() for key in keys
)
ASSIGNMENTS = st.fixed_dictionaries({}, optional=VALUES)
RECORDED = 8


def config(**assigned: Any) -> RunConfig:
    values: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in BASE.items()}
    for path, value in assigned.items():
        section, _, key = path.partition(".")
        values.setdefault(section, {})[key] = value
    return RunConfig.model_validate(values)


def differing(saved: RunConfig, current: RunConfig) -> set[str]:
    return {problem.path for problem in resume_differences(saved, current, recorded_global_batch_size=RECORDED)}


def test_every_key_is_decided_once_with_a_reason() -> None:
    assert sorted([*RESUME_KEYS, *FREE_KEYS]) == KEYS
    assert sorted(VALUES) == KEYS, "the tests below must know values of every key"
    assert all([*RESUME_KEYS.values(), *FREE_KEYS.values()])


@given(ASSIGNMENTS)
def test_a_run_may_go_on_from_itself(assigned: dict[str, Any]) -> None:
    assigned["training.global_batch_size"] = RECORDED
    assert differing(config(**assigned), config(**assigned)) == set()


@given(ASSIGNMENTS, ASSIGNMENTS)
def test_differences_are_those_of_the_keys_that_must_be_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Against a plain statement of the rules, key by key."""
    saved, current = config(**one), config(**other)
    old, new = saved.model_dump(), current.model_dump()
    expected = set()
    for path in RESUME_KEYS:
        section, _, key = path.partition(".")
        if old[section][key] != new[section][key]:
            expected.add(path)
    a, b = saved.training, current.training
    if (saved.lora.lora_alpha or 2 * saved.lora.r) == (current.lora.lora_alpha or 2 * current.lora.r):
        expected.discard("lora.lora_alpha")
    else:
        expected.add("lora.lora_alpha")
    if sorted(saved.lora.target_modules) == sorted(current.lora.target_modules):
        expected.discard("lora.target_modules")
    if sorted(saved.lora.modules_to_save) == sorted(current.lora.modules_to_save):
        expected.discard("lora.modules_to_save")
    if "8bit" in a.optim and "8bit" in b.optim:
        expected.discard("training.optim")
    if b.global_batch_size in (None, RECORDED):
        expected.discard("training.global_batch_size")
    else:
        expected.add("training.global_batch_size")
    if a.max_steps is not None and b.max_steps is not None:
        expected.discard("training.num_train_epochs")
    constant = (a.lr_scheduler_type, b.lr_scheduler_type) == ("constant", "constant")
    if constant and a.warmup_steps is not None and b.warmup_steps is not None:
        expected -= {"training.num_train_epochs", "training.max_steps"}
    assert differing(saved, current) == expected


@given(st.data(), st.sampled_from(sorted(set(FREE_KEYS))))
def test_free_keys_never_matter(data: st.DataObject, key: str) -> None:
    base = data.draw(ASSIGNMENTS)
    base["training.global_batch_size"] = RECORDED
    assert differing(config(**base), config(**{**base, key: data.draw(VALUES[key])})) == set()


def test_every_difference_is_listed_with_both_values_reason_and_fix() -> None:
    saved = config(**{"training.learning_rate": 2e-4, "lora.r": 8})
    current = config(**{"training.learning_rate": 1e-4, "lora.r": 16, "training.seed": 1, "model.revision": "v2"})
    problems = resume_differences(saved, current, recorded_global_batch_size=RECORDED)
    assert [problem.path for problem in problems] == [
        "model.revision",
        "lora.r",
        "lora.lora_alpha",
        "training.learning_rate",
        "training.seed",
    ]
    assert str(problems[3]) == (
        "training.learning_rate: 0.0001 now, 0.0002 in the checkpoint; it sizes every update\n"
        "    fix: set it to 0.0002, or start anew: --resume never, or another output.name"
    )
    assert "'v2' now, null in the checkpoint" in problems[0].message


def test_recorded_global_batch_size_is_kept() -> None:
    derived = config(**{"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 2})
    assert differing(derived, config()) == set(), "whatever the triple says now"
    assert differing(derived, config(**{"training.global_batch_size": RECORDED})) == set()
    [problem] = resume_differences(
        derived, config(**{"training.global_batch_size": 16}), recorded_global_batch_size=RECORDED
    )
    assert problem.path == "training.global_batch_size"
    assert problem.message.startswith("16 now, 8 in the checkpoint; it is fixed at the first launch")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"max_steps": 10}, {"max_steps": 20}, {"training.max_steps"}),
        ({"max_steps": 10}, {"max_steps": 10, "num_train_epochs": 3}, set()),
        ({"max_steps": 10}, {"max_steps": 20, "num_train_epochs": 3}, {"training.max_steps"}),
        ({}, {"num_train_epochs": 3}, {"training.num_train_epochs"}),
        ({}, {"max_steps": 20}, {"training.max_steps"}),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 0},
            {"lr_scheduler_type": "constant", "warmup_steps": 0, "num_train_epochs": 3},
            set(),
        ),
        (
            {"lr_scheduler_type": "constant"},
            {"lr_scheduler_type": "constant", "num_train_epochs": 3},  # 3 % of another number of steps
            {"training.num_train_epochs"},
        ),
    ],
)
def test_length_may_change_only_where_the_learning_rate_does_not_depend_on_it(
    before: dict[str, Any], now: dict[str, Any], expected: set[str]
) -> None:
    saved = config(**{f"training.{key}": value for key, value in before.items()})
    current = config(**{f"training.{key}": value for key, value in now.items()})
    problems = resume_differences(saved, current, recorded_global_batch_size=RECORDED)
    assert {problem.path for problem in problems} == expected
    for problem in problems:
        assert "only lr_scheduler_type constant with an explicit warmup_steps leaves the length free" in problem.message


def test_documentation_lists_the_keys_that_may_differ() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    table = page.partition("**May differ**")[2].partition("Special cases:")[0]
    named = set(re.findall(r"`(\w+\.[\w*]+)`", table))
    assert {path for path in FREE_KEYS if path.partition(".")[0] not in ("oom", "output")} | {
        "oom.*",
        "output.*",
    } == named
    assert not any(path.startswith(("oom.", "output.")) for path in RESUME_KEYS)


def test_other_content_of_the_training_set_is_a_difference() -> None:
    assert fingerprint_difference("aa", "aa") is None
    problem = fingerprint_difference("aa", "bb")
    assert problem is not None and problem.path == "data.train"
    assert "fingerprint bb now, aa in the checkpoint" in problem.message
    assert problem.fix is not None and problem.fix.startswith("bring back the file of the first launch")


def plan(**changes: Any) -> Plan:
    base = Plan(
        name="run",
        run_dir="run",
        config=config(),
        profile_kind="zero2",
        profile_file="zero2.yaml",
        profile={},
        world_size=2,
        device="cpu",
        mixed_precision="no",
        global_batch_size=RECORDED,
    )
    return replace(base, **changes)


def test_nothing_changed_is_no_note() -> None:
    assert resume_notes(plan(), plan()) == []
    assert resume_notes(plan(), plan(config=config(**{"training.logging_steps": 10}))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 4},
        {"profile_kind": "ddp"},
        {"training.per_device_train_batch_size": 1},
        {"training.max_tokens_per_micro_batch": 512},
    ],
)
def test_another_split_with_dropout_is_said_to_be_the_same_only_statistically(change: dict[str, Any]) -> None:
    word = "with lora.lora_dropout = 0.1 another split of a step draws other dropout masks"
    keys = {key: value for key, value in change.items() if "." in key}
    fields = {key: value for key, value in change.items() if "." not in key}
    for dropout, said in ((0.1, 1), (0.0, 0)):
        before = plan(config=config(**{"lora.lora_dropout": dropout}))
        now = plan(config=config(**{"lora.lora_dropout": dropout, **keys}), **fields)
        assert sum(note.startswith(word) for note in resume_notes(before, now)) == said
        assert not any("dropout" in note for note in resume_notes(before, before))


def test_what_changed_and_is_allowed_is_said() -> None:
    changed = plan(
        profile_kind="ddp",
        world_size=4,
        mixed_precision="bf16",
        config=config(**{"model.attn_implementation": "eager", "training.gradient_accumulation_steps": 4}),
    )
    assert resume_notes(plan(), changed) == [
        "resumed with another profile: ddp, before zero2",
        "resumed with another number of ranks: 4, before 2",
        "resumed with another mixed precision: bf16, before no",
        "resumed with model.attn_implementation = 'eager', before 'sdpa'",
        "training.gradient_accumulation_steps = 4 has no effect on a resumed run: a step keeps its 8 samples",
    ]
