"""Each value that a shipped profile sets, changed: it is refused with its reason, or the plan and the launch change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.config.load import parse_run_config
from allranks.errors import ProblemsError
from allranks.launch.command import build_launch
from allranks.plan.hardware import Gpu, Hardware
from allranks.plan.plan import Plan
from allranks.plan.planner import make_plan
from allranks.profiles import load_profile

FOLDER = Path(__file__).resolve().parents[2] / "profiles"
CPU = Hardware(gpus=(), cpu_count=2)
H200 = Gpu(name="NVIDIA H200", total_bytes=150_000_000_000, compute_capability=(9, 0))
GPUS = Hardware(gpus=(H200, H200), cpu_count=16)

Outcome = str | Callable[[Plan, Plan], None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another value of a key, and what becomes of it.

    Attributes:
        value: instead of the shipped one.
        outcome: part of the error that refuses it, or the check that compares the plans before and after.
        hardware: on which the plans are made.
    """

    value: Any
    outcome: Outcome
    hardware: Hardware = CPU


def _argv(plan: Plan) -> tuple[str, ...]:
    return build_launch(plan, port=0, launch_no=1, environ={}, python="python").argv


def _three_ranks(before: Plan, after: Plan) -> None:
    assert (before.world_size, after.world_size) == (2, 3)
    assert after.global_batch_size == before.global_batch_size // 2 * 3
    at = _argv(after).index("--num_processes")
    assert _argv(after)[at + 1] == "3"


def _fp16(before: Plan, after: Plan) -> None:
    assert (before.mixed_precision, after.mixed_precision) == ("bf16", "fp16")
    at = _argv(after).index("--mixed_precision")
    assert _argv(after)[at + 1] == "fp16"


def _kind(expected: str) -> Callable[[Plan, Plan], None]:
    def check(before: Plan, after: Plan) -> None:
        assert before.profile_kind != after.profile_kind == expected

    return check


def _reaches_the_ranks(key: str) -> Callable[[Plan, Plan], None]:
    """The launch hands the changed file itself to accelerate; a test of real ranks sees what torch makes of it."""

    def check(before: Plan, after: Plan) -> None:
        assert before.profile["fsdp_config"][key] != after.profile["fsdp_config"][key]
        at = _argv(after).index("--config_file")
        handed = yaml.safe_load(Path(_argv(after)[at + 1]).read_text(encoding="utf-8"))
        assert handed == after.profile

    return check


EVERYWHERE = {
    "compute_environment": Change(value="AMAZON_SAGEMAKER", outcome="allranks launches on this machine only"),
    "mixed_precision": Change(value="fp16", outcome=_fp16, hardware=GPUS),
    "num_machines": Change(value=2, outcome="allranks runs on one machine for now"),
}
SEVERAL = {**EVERYWHERE, "num_processes": Change(value=3, outcome=_three_ranks)}
DEEPSPEED = {
    "deepspeed_config.gradient_accumulation_steps": Change(
        value=4, outcome="set training.gradient_accumulation_steps in the run"
    ),
    "deepspeed_config.offload_optimizer_device": Change(value="cpu", outcome="offloading is not supported"),
    "deepspeed_config.offload_param_device": Change(value="nvme", outcome="offloading is not supported"),
    "deepspeed_config.zero3_init_flag": Change(value=True, outcome="a 4-bit base can't be built in pieces"),
}
CHANGES: dict[str, dict[str, Change]] = {
    "single": {
        **EVERYWHERE,
        "distributed_type": Change(value="MULTI_GPU", outcome="1 does not suit distributed_type: MULTI_GPU"),
        "num_processes": Change(value=2, outcome="2 does not suit distributed_type: NO"),
    },
    "ddp": {
        **SEVERAL,
        "distributed_type": Change(value="NO", outcome="2 does not suit distributed_type: NO"),
    },
    "zero2": {
        **SEVERAL,
        **DEEPSPEED,
        "distributed_type": Change(value="FSDP", outcome="deepspeed_config: has no effect with distributed_type"),
        "deepspeed_config.zero_stage": Change(value=3, outcome=_kind("zero3")),
    },
    "zero3": {
        **SEVERAL,
        **DEEPSPEED,
        "distributed_type": Change(value="MULTI_GPU", outcome="deepspeed_config: has no effect with distributed_type"),
        "deepspeed_config.zero_stage": Change(value=2, outcome=_kind("zero2")),
        "deepspeed_config.zero3_save_16bit_model": Change(value=True, outcome="never the base model"),
    },
    "fsdp": {
        **SEVERAL,
        "distributed_type": Change(value="DEEPSPEED", outcome="fsdp_config: has no effect with distributed_type"),
        "fsdp_config.fsdp_version": Change(value=1, outcome="version 1 can't shard frozen 4-bit weights"),
        "fsdp_config.fsdp_auto_wrap_policy": Change(value="SIZE_BASED_WRAP", outcome="becomes one unit"),
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Change(
            value="OlmoDecoderLayer", outcome=_reaches_the_ranks("fsdp_transformer_layer_cls_to_wrap")
        ),
        "fsdp_config.fsdp_reshard_after_forward": Change(
            value=False, outcome=_reaches_the_ranks("fsdp_reshard_after_forward")
        ),
        "fsdp_config.fsdp_offload_params": Change(value=True, outcome="offloading is not supported"),
        "fsdp_config.fsdp_cpu_ram_efficient_loading": Change(value=True, outcome="on one rank only; write false"),
        "fsdp_config.fsdp_activation_checkpointing": Change(
            value=True, outcome="set training.gradient_checkpointing: true"
        ),
        "fsdp_config.fsdp_state_dict_type": Change(
            value="SHARDED_STATE_DICT", outcome="allranks writes its own checkpoints"
        ),
    },
}


def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _changed(name: str, path: str, value: Any, folder: Path) -> Path:
    content = copy.deepcopy(_content(name))
    section, _, key = path.rpartition(".")
    (content[section] if section else content)[key] = value
    file = folder / f"my-{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def _plan(profile: str, hardware: Hardware, *overrides: str) -> Plan:
    text = "model: {name_or_path: org/model}\ndata: {train: org/data}\n"
    config = parse_run_config(text, source="run.yaml", folder=Path(), overrides=overrides)
    return make_plan(config, load_profile(profile), hardware, run_dir=Path("/runs/first"))


def test_no_value_of_a_shipped_profile_is_left_out() -> None:
    files = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert files == sorted(CHANGES)
    assert len(files) == 5
    for name in files:
        assert set(_flat(_content(name))) == set(CHANGES[name]), name


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, changes in CHANGES.items() for path in changes], ids="-".join
)
def test_a_changed_value_is_refused_or_has_its_effect(name: str, path: str, tmp_path: Path) -> None:
    change = CHANGES[name][path]
    assert _flat(_content(name))[path] != change.value
    file = str(_changed(name, path, change.value, tmp_path))
    if isinstance(change.outcome, str):
        with pytest.raises(ProblemsError) as caught:
            load_profile(file)
        assert change.outcome in str(caught.value)
    else:
        change.outcome(_plan(name, change.hardware), _plan(file, change.hardware))


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_clipping_that_the_profile_adds_must_be_the_runs(name: str, tmp_path: Path) -> None:
    file = str(_changed(name, "deepspeed_config.gradient_clipping", 0.5, tmp_path))
    with pytest.raises(ProblemsError) as caught:
        _plan(file, CPU)
    assert f"1.0 contradicts deepspeed_config.gradient_clipping: 0.5 of profile my-{name}" in str(caught.value)
    assert _plan(file, CPU, "training.max_grad_norm=0.5").profile_kind == name


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_precision_that_the_run_asks_for_must_be_the_profiles(name: str) -> None:
    with pytest.raises(ProblemsError, match=f"'fp16' contradicts mixed_precision: bf16 of profile {name}"):
        _plan(name, GPUS, "training.mixed_precision=fp16")
