"""Two ranks share one GPU over gloo and one of them runs out of memory for real.

    python benchmarks/gpu_one_card.py --shape llama3-8b --out benchmarks/results

For each profile a first run measures what each micro-step reserves; the next runs limit torch's allocator so that
the micro-batch with the one long sample does not fit, once in forward and once in backward. `ddp` and `zero2` must
go on, `zero3` and `fsdp` must stop on all ranks. The logits of a probe must be the same on every profile.
Writes one JSON file: versions, the command, and one entry per run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
STEPS = 6
GLOBAL_BATCH = 8
LONG_TOKENS = {"llama3-8b": 6000, "tiny": 400, "smollm2": 6000}


def make_model(shape: str, folder: Path) -> None:
    """A model of this shape with random weights, and a tokenizer of the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=8192
    )
    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_set(path: Path, long_tokens: int, chars_per_token: int) -> None:
    """One long sample among short ones; `STEPS` global batches in all."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(STEPS * GLOBAL_BATCH):
            tokens = long_tokens if number == 20 else rng.randint(150, 400)
            text = "".join(rng.choice("abcdefgh ") for _ in range(tokens * chars_per_token))
            file.write(json.dumps({"prompt": "Say it: ", "completion": text}) + "\n")


class Bench:
    """Starts runs and keeps what they measured."""

    def __init__(self, model: Path, work: Path, max_length: int) -> None:
        self.model, self.work, self.max_length = model, work, max_length
        self.runs: list[dict[str, Any]] = []

    def run(self, name: str, profile: str, *, ranks: int = 2, **wanted: Any) -> tuple[Path, int]:
        shutil.rmtree(self.work / "runs" / name, ignore_errors=True)
        config = {
            "model": {"name_or_path": str(self.model)},
            "lora": {"r": 16},
            "data": {
                "train": str(self.work / "train.jsonl"),
                "max_length": self.max_length,
                "max_length_cap": self.max_length,
            },
            "training": {
                "global_batch_size": GLOBAL_BATCH,
                "per_device_train_batch_size": 4,
                "gradient_checkpointing": True,
            },
            "oom": {"stop_timeout_s": 30},
            "output": {"dir": str(self.work / "runs"), "name": name, "save_steps": None},
        }
        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        argv = [sys.executable, "-m", "accelerate.commands.launch"]
        argv += ["--config_file", str(ROOT / f"profiles/{profile}.yaml"), "--num_processes", str(ranks)]
        argv += [
            "--main_process_port",
            str(_free_port()),
            str(Path(__file__).with_name("limited_worker.py")),
            str(file),
        ]
        paths = {key: str(self.work / f"{name}.{key}") for key in ("failures",)}
        began = time.time()
        with (self.work / f"{name}.log").open("w", encoding="utf-8") as log:
            status = subprocess.run(
                argv,
                env={**os.environ, "ALLRANKS_BENCH": json.dumps({**paths, **wanted})},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=400,
                check=False,
            ).returncode
        print(f"{name}: exit {status} after {time.time() - began:.0f} s", flush=True)
        return self.work / "runs" / name, status

    def limits(self, profile: str) -> dict[str, int]:
        """Allocator limits under which only the long micro-batch fails, by the phase in which it does."""
        peaks = self.work / f"{profile}.peaks"
        _, status = self.run(f"{profile}-free", profile, peaks=str(peaks), logits=str(self.work / f"{profile}.logits"))
        assert status == 0, f"see {profile}-free.log"
        steps = [json.loads(line) for rank in (0, 1) for line in open(f"{peaks}.rank{rank}", encoding="utf-8")]
        long = max(steps, key=lambda s: s["backward_bytes"])
        others = max(s["backward_bytes"] for s in steps if s["shape"][1] < long["shape"][1])
        self.runs.append({"run": f"{profile}-free", "long": long, "others_peak_bytes": others})
        return {
            "forward": (others + long["forward_bytes"]) // 2,
            "backward": (long["forward_bytes"] + long["backward_bytes"]) // 2,
        }

    def fail(self, profile: str, phase: str, limit_bytes: int) -> None:
        name = f"{profile}-{phase}"
        run_dir, status = self.run(name, profile, limit_bytes=limit_bytes)
        failures = [event for rank in (0, 1) for event in _events(run_dir, rank) if event["kind"] == "failure"]
        entry: dict[str, Any] = {
            "run": name,
            "limit_bytes": limit_bytes,
            "exit": status,
            "failures": [{k: f[k] for k in ("rank", "step", "phase", "failure", "attempt")} for f in failures],
            "verdict": json.loads((run_dir / "verdict.json").read_text(encoding="utf-8")),
        }
        moments = sorted(
            json.loads(line)["time"] for file in self.work.glob(f"{name}.failures.rank*") for line in file.open()
        )
        if status == 0:
            entry |= _recovery(run_dir, moments, failures)
        else:
            stops = [event["time"] for rank in (0, 1) for event in _events(run_dir, rank) if event["kind"] == "stop"]
            entry["seconds_from_oom_to_last_rank_leaving"] = max(stops) - moments[0]
        print(json.dumps(entry), flush=True)
        self.runs.append(entry)


def _recovery(run_dir: Path, moments: list[float], failures: list[dict[str, Any]]) -> dict[str, Any]:
    """From the last OOM of the step to its commit, beside what the step took by itself."""
    step = failures[-1]["step"]
    retries = [e for rank in (0, 1) for e in _events(run_dir, rank) if e["kind"] == "retry" and e["step"] == step]
    commits = [e for rank in (0, 1) for e in _events(run_dir, rank) if e["kind"] == "step" and e["step"] == step]
    steady = [e["seconds"] for e in _events(run_dir, 0) if e["kind"] == "step" and e["step"] > step]
    last_retry = max(retry["time"] for retry in retries)
    return {
        "retries": max(retry["attempt"] for retry in retries),
        "caps_after": commits[0]["caps"],
        "seconds_from_oom_to_retry": last_retry - max(m for m in moments if m <= last_retry),
        "seconds_from_first_oom_to_finished_step": max(c["time"] for c in commits) - moments[0],
        "seconds_of_the_retried_step_itself": max(c["time"] for c in commits) - last_retry,
        "median_seconds_of_later_steps": statistics.median(steady) if steady else None,
    }


def _events(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    with (run_dir / "events" / f"rank{rank}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare_logits(work: Path, profiles: list[str]) -> dict[str, float]:
    """Largest difference of the probe's logits from `ddp`'s, and the standard deviation of those."""
    from safetensors.torch import load_file

    expected = load_file(work / "ddp.logits")["logits"]
    found = {name: load_file(work / f"{name}.logits")["logits"] for name in profiles}
    return {"std": float(expected.std()), **{n: float((t - expected).abs().max()) for n, t in found.items()}}


def main() -> None:
    """Run all cases of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "smollm2"], required=True)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2, for --shape smollm2")
    parser.add_argument("--profiles", default="single,ddp,zero2,zero3,fsdp")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-bench"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.work / arguments.shape
    work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or arguments.work / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    long_tokens = LONG_TOKENS[arguments.shape]
    make_set(work / "train.jsonl", long_tokens, chars_per_token=2 if arguments.shape == "smollm2" else 1)
    bench = Bench(model, work, max_length=long_tokens)
    profiles = arguments.profiles.split(",")
    from allranks.train.versions import versions

    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "runs": bench.runs,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"one-card-{arguments.shape}-{'-'.join(profiles)}.json"
    try:
        for profile in profiles:
            if profile == "single":
                _, status = bench.run("single", "single", ranks=1)
                bench.runs.append({"run": "single", "exit": status})
                continue
            limits = bench.limits(profile)
            for phase in ("forward", "backward"):
                bench.fail(profile, phase, limits[phase])
        result["largest_logit_difference_from_ddp"] = compare_logits(work, [p for p in profiles if p != "single"])
    finally:
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for log in work.glob("*.log"):
            shutil.copy(log, arguments.out / f"{arguments.shape}-{log.name}.txt")
    print(json.dumps(result["largest_logit_difference_from_ddp"]))


if __name__ == "__main__":
    main()
