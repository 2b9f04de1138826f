"""Real training runs for the tests: a tiny Llama in NF4, a small set, real ranks through `accelerate launch`."""

from __future__ import annotations

import csv
import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from allranks.demo.tiny import write_tiny_set

ROOT = Path(__file__).resolve().parents[1]
OBSERVER = Path(__file__).with_name("observed_worker.py")
TIMEOUT_S = 150


def config_of(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of 10 steps over 60 samples; `changes` are dotted keys with `__` for the dot."""
    train = folder / "train.jsonl"
    if not train.exists():
        write_tiny_set(train, samples=60, seed=1)
        write_tiny_set(folder / "eval.jsonl", samples=11, seed=2)
    config: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "lora": {"r": 4},
        "data": {"train": str(train), "max_length": 128},
        "training": {
            "max_steps": 10,
            "global_batch_size": 8,
            "per_device_train_batch_size": 4,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        },
        "output": {"dir": str(folder / "runs"), "save_steps": None},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config.setdefault(section, {})[name] = value
    return config


_WORDS = {"calm": "sea sky", "glad": "sun song", "sad": "rain grey"}


def _write_csv(path: Path, *, samples: int, seed: int) -> Path:
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number in range(samples):
            label = list(_WORDS)[number % 3]
            rows.writerow([" ".join(rng.choices(_WORDS[label].split(), k=rng.randint(2, 9))), label])
    return path


def classifier_config(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of 6 steps over 60 sentences of three classes, evaluated before and after on 13."""
    train = _write_csv(folder / "train.csv", samples=60, seed=1)
    held_out = _write_csv(folder / "eval.csv", samples=13, seed=2)
    return config_of(
        model,
        folder,
        model__task="sequence-classification",
        data__train=str(train),
        data__eval=str(held_out),
        training__max_steps=6,
        training__eval_on_start=True,
        **changes,
    )


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that ended."""

    run_dir: Path
    status: int
    output: str

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        lines = (self.run_dir / "events" / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def committed(self) -> dict[int, list[int]]:
        """Sample ids by committed step, in the order of the global batch; of a replayed step, the last time."""
        return {event["step"]: event["sample_ids"] for event in self.events("step")}

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def tensors(self, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.run_dir / name)

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "verdict.json").read_text(encoding="utf-8"))


def environment(device: str = "cpu", **more: str) -> dict[str, str]:
    """Of a run on CPU ranks, whatever GPUs the machine has, or on its GPUs."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "FSDP", "PET_"))}
    return {
        **env,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": device,
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def launch_bare(
    config: dict[str, Any],
    folder: Path,
    *,
    profile: str,
    ranks: int,
    observe: dict[str, Any],
    device: str = "cpu",
) -> Finished:
    """`accelerate launch --config_file profiles/P.yaml`, with the observer as the worker.

    `profile` is a shipped one, or the absolute path of another file without its ending.
    `observe` is what tests/observed_worker.py shall do; empty: the plain worker.
    """
    name = config["output"].setdefault("name", profile)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    worker = [str(OBSERVER)] if observe else ["-m", "allranks.train"]
    argv = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "profiles" / f"{profile}.yaml"),
    ]
    argv += ["--num_processes", str(ranks), "--main_process_port", str(free_port()), *worker, str(file)]
    run_dir = Path(config["output"]["dir"]) / name
    return _to_the_end(argv, run_dir, folder, TIMEOUT_S, environment(device, ALLRANKS_TEST_OBSERVE=json.dumps(observe)))


def command(
    config: dict[str, Any],
    folder: Path,
    *,
    profile: str,
    ranks: int,
    inject: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> tuple[list[str], Path]:
    """The command line of `allranks run`, or of `allranks drill` with injections, and the run directory."""
    name = config["output"].setdefault("name", profile)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    argv = [
        str(Path(sys.executable).with_name("allranks")),
        "drill" if inject else "run",
        str(file),
        "--profile",
        profile,
    ]
    argv += [] if Path(profile).stem.endswith("single") else ["--gpus", str(ranks)]
    argv += [word for fault in inject for word in ("--inject", fault)]
    return [*argv, *more], Path(config["output"]["dir"]) / (f"{name}-drill" if inject else name)


def launch(
    config: dict[str, Any],
    folder: Path,
    *,
    profile: str,
    ranks: int,
    inject: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    more_env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    device: str = "cpu",
) -> Finished:
    """Run `allranks run` or `allranks drill` to its end."""
    argv, run_dir = command(config, folder, profile=profile, ranks=ranks, inject=inject, more=more)
    return _to_the_end(argv, run_dir, folder, timeout_s, environment(device, **(more_env or {})))


def _to_the_end(argv: list[str], run_dir: Path, folder: Path, timeout_s: float, env: dict[str, str]) -> Finished:
    done = subprocess.run(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        check=False,
    )
    return Finished(run_dir=run_dir, status=done.returncode, output=done.stdout)


def free_port() -> int:
    """A port that no test beside this one takes, and no connection: below the range from which the kernel deals."""
    beside = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(20_000 + 1_000 * beside, 21_000 + 1_000 * beside))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port is free from {min(ports)} to {max(ports)}")
