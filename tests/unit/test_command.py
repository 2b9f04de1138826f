from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.schema import DataConfig, ModelConfig, RunConfig
from allranks.launch.command import LaunchRequest, build_launch, render_dry_run
from allranks.plan.plan import Plan, ProfileKind

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
KINDS: tuple[ProfileKind, ...] = ("single", "ddp", "zero2", "zero3", "fsdp")


def plan(kind: ProfileKind = "ddp", **fields: Any) -> Plan:
    file = PROFILES / f"{kind}.yaml"
    return replace(
        Plan(
            name="a",
            run_dir="/data/runs/a",
            config=RunConfig(model=ModelConfig(name_or_path="m"), data=DataConfig(train="t.jsonl")),
            profile_kind=kind,
            profile_file=str(file),
            profile=yaml.safe_load(file.read_text()),
            world_size=1 if kind == "single" else 2,
            device="cpu",
            mixed_precision="no",
            global_batch_size=8,
        ),
        **fields,
    )


def request(a_plan: Plan, environ: dict[str, str] | None = None, **arguments: Any) -> LaunchRequest:
    fixed = {"port": 0, "launch_no": 1, "python": "python", "environ": environ or {}}
    return build_launch(a_plan, **{**fixed, **arguments})


def test_the_whole_command_line_of_several_ranks() -> None:
    assert request(plan("zero2", mixed_precision="bf16"), launch_no=12).argv == (
        *("python", "-m", "accelerate.commands.launch"),
        *("--config_file", str(PROFILES / "zero2.yaml")),
        *("--num_processes", "2", "--num_machines", "1", "--machine_rank", "0"),
        *("--mixed_precision", "bf16"),
        *("--main_process_port", "0", "--rdzv_backend", "c10d", "--max_restarts", "10000"),
        *("--log_dir", "/data/runs/a/logs/launch-0012/torchrun"),
        *("-m", "allranks.train", "--run-dir", "/data/runs/a"),
    )


def test_the_whole_command_line_of_one_rank() -> None:
    assert request(plan("single")).argv == (
        *("python", "-m", "accelerate.commands.launch"),
        *("--config_file", str(PROFILES / "single.yaml")),
        *("--num_processes", "1", "--num_machines", "1", "--machine_rank", "0"),
        *("--mixed_precision", "no"),
        *("-m", "allranks.train", "--run-dir", "/data/runs/a"),
    )


def test_the_whole_environment_on_the_cpu() -> None:
    assert request(plan(), port=4321, launch_no=3).env == {
        "ALLRANKS_LAUNCHER": "1",
        "ALLRANKS_LAUNCH": "3",
        "PET_RDZV_ENDPOINT": "127.0.0.1:4321",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_REDIRECTS": "3",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def test_the_whole_environment_on_gpus() -> None:
    made = request(plan(device="cuda"), {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, live_line=True)
    assert made.env == {
        "ALLRANKS_LAUNCHER": "1",
        "ALLRANKS_LAUNCH": "1",
        "ALLRANKS_LIVE_LINE": "1",
        "PET_RDZV_ENDPOINT": "127.0.0.1:0",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_REDIRECTS": "3",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "DS_ACCELERATOR": "cuda",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert made.environment({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"})["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_settings_of_the_user_stay(name: str) -> None:
    made = request(plan(device="cuda"), {name: "max_split_size_mb:512"})
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made.env
    assert made.environment({name: "max_split_size_mb:512"})[name] == "max_split_size_mb:512"


def test_threads_of_the_user_stay_and_that_is_said() -> None:
    made = request(plan(), {"OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in made.env
    assert made.notes == ("OMP_NUM_THREADS=4 kept as set; a CPU rank has 1 by default",)


def test_variables_of_another_launcher_do_not_reach_the_ranks() -> None:
    inherited = {
        "RANK": "3",
        "PATH": "/bin",
        "PET_NNODES": "2",
        "ACCELERATE_USE_FSDP": "true",
        "PET_RDZV_ENDPOINT": "x",
    }
    made = request(plan(), inherited)
    environment = made.environment(inherited)
    assert not {"RANK", "PET_NNODES", "ACCELERATE_USE_FSDP"} & set(environment)
    assert environment["PATH"] == "/bin"
    assert environment["PET_RDZV_ENDPOINT"] == "127.0.0.1:0"
    ignored = "RANK, PET_NNODES, ACCELERATE_USE_FSDP, PET_RDZV_ENDPOINT"
    assert made.notes == (f"left out of the ranks' environment: {ignored} (of another launcher)",)


@given(environ=st.dictionaries(st.sampled_from(["RANK", "PET_X", "HOME", "OMP_NUM_THREADS", "HF_TOKEN"]), st.text()))
def test_the_request_is_a_function_of_its_arguments(environ: dict[str, str]) -> None:
    made = request(plan(), environ)
    assert made == request(plan(), environ)
    assert "HF_TOKEN" not in made.env
    assert set(made.environment(environ)) == (set(environ) - set(made.unset)) | set(made.env)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dry_run_runs_as_shell_text(kind: ProfileKind, tmp_path: Path) -> None:
    """The printed text, given to a shell whose python only tells its arguments and environment."""
    fake = tmp_path / "it's a python"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$FAKE_OUT/argv"\nenv > "$FAKE_OUT/env"\n')
    fake.chmod(0o755)
    a_plan = plan(kind, run_dir=str(tmp_path / "runs $HOME/a"))
    inherited = {"RANK": "3", "PATH": os.defpath, "FAKE_OUT": str(tmp_path)}
    made = request(a_plan, inherited, python=str(fake), live_line=True)

    text = render_dry_run(made, a_plan)
    subprocess.run(["sh", "-e"], input=text, text=True, env=inherited, check=True, timeout=30)

    by_hand = ["0" if word == "10000" else word for word in made.argv[1:]]
    assert (tmp_path / "argv").read_text().splitlines() == by_hand
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    only_under_the_launcher = {"ALLRANKS_LAUNCHER", "ALLRANKS_LAUNCH", "ALLRANKS_LIVE_LINE", "PET_REDIRECTS"}
    assert {name: seen.get(name) for name in made.env} == {
        name: None if name in only_under_the_launcher else value for name, value in made.env.items()
    }
    assert "RANK" not in seen
    assert Plan.read(Path(a_plan.run_dir)) == a_plan


def test_the_dry_run_is_short_to_read_at_its_end() -> None:
    text = render_dry_run(request(plan("zero2")), plan("zero2"))
    assert text.startswith("# zero2 on 2 cpu ranks, global batch 8\nmkdir -p /data/runs/a\n")
    json.loads(text.partition("<<'PLAN'\n")[2].partition("\nPLAN\n")[0])
    assert text.endswith(
        "    python \\\n"
        "    -m accelerate.commands.launch \\\n"
        f"    --config_file {PROFILES}/zero2.yaml \\\n"
        "    --num_processes 2 \\\n"
        "    --num_machines 1 \\\n"
        "    --machine_rank 0 \\\n"
        "    --mixed_precision no \\\n"
        "    --main_process_port 0 \\\n"
        "    --rdzv_backend c10d \\\n"
        "    --max_restarts 0 \\\n"
        "    --log_dir /data/runs/a/logs/launch-0001/torchrun \\\n"
        "    -m allranks.train \\\n"
        "    --run-dir /data/runs/a\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_understands_every_flag(kind: ProfileKind) -> None:
    """An unknown or misspelt flag would be taken for the training script's."""
    launch = pytest.importorskip("accelerate.commands.launch")
    arguments = launch.launch_command_parser().parse_args(list(request(plan(kind), python=sys.executable).argv[3:]))
    assert arguments.training_script == "allranks.train"
    assert arguments.training_script_args == ["--run-dir", "/data/runs/a"]
    assert arguments.module is True
    assert arguments.num_processes == (1 if kind == "single" else 2)
