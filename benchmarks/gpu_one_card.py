"""Two ranks share one GPU over gloo, and the one with the long sample runs out of memory for real.

    python benchmarks/gpu_one_card.py --shape llama3-8b --out benchmarks/results

One run per profile, two for those that stop. When a long sample comes up, the rank that has it lowers torch's memory
fraction (benchmarks/limited_worker.py): the first time forward can't finish, the second time backward. `single`, `ddp`
and `zero2` must go on, `zero3` and `fsdp` must stop on all ranks. The logits of a probe must be the same everywhere.
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
import traceback
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
STEPS = 8
GLOBAL_BATCH = 8
LONG_TOKENS = 1400
SHORT_TOKENS = (900, 1000)
TIMEOUT_S = 300
STOPPING = ("zero3", "fsdp")
"""Profiles that stop at the first failure: one run for each phase."""
CHARS_PER_TOKEN = {"llama3-8b": 1, "tiny": 1, "smollm2": 2}
"""The random models have a tokenizer of bytes; SmolLM2's makes about half as many tokens of random letters."""


def make_model(shape: str, folder: Path) -> None:
    """A model of this shape with random weights, and a tokenizer of the 256 bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from allranks.demo.tiny import byte_tokenizer

    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    byte_tokenizer(longest_tokens=8192).save_pretrained(folder)


def make_set(path: Path, chars_per_token: int) -> None:
    """`STEPS` global batches of samples of nearly one length, and four long ones among them."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(STEPS * GLOBAL_BATCH):
            tokens = LONG_TOKENS + 100 if number % 16 == 5 else rng.randint(*SHORT_TOKENS)
            text = "".join(rng.choice("abcdefgh ") for _ in range(tokens * chars_per_token))
            file.write(json.dumps({"prompt": "Say it: ", "completion": text}) + "\n")


def make_even_set(path: Path, *, samples: int, tokens: int) -> None:
    """Samples of `tokens` tokens each, but for the prompt's, for the random models."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(samples):
            text = "abcdefgh"[number % 8] * tokens
            file.write(json.dumps({"prompt": "Say it: ", "completion": text}) + "\n")


class Bench:
    """Starts runs and keeps what they measured."""

    def __init__(self, model: Path, work: Path, long_tokens: int) -> None:
        self.model, self.work, self.long_tokens = model, work, long_tokens
        self.runs: list[dict[str, Any]] = []

    def run(self, profile: str, phases: list[str]) -> None:
        """One run in which these phases do not fit, one after the other, each on the rank that has the long sample."""
        ranks = 1 if profile == "single" else 2
        name = "-".join((profile, *phases))
        config = {
            "model": {"name_or_path": str(self.model)},
            "lora": {"r": 16},
            "data": {"train": str(self.work / "train.jsonl"), "max_length": self.long_tokens},
            "training": {"global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": 4},
            "oom": {"stop_timeout_s": 30},
            "output": {"dir": str(self.work / "runs"), "name": name, "save_steps": None},
        }
        shutil.rmtree(self.work / "runs" / name, ignore_errors=True)
        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        wanted = {
            "squeeze": phases,
            "wide_tokens": int(0.9 * self.long_tokens),
            "moments": str(self.work / f"{name}.moments"),
            "logits": str(self.work / f"{profile}.logits"),
        }
        argv = [sys.executable, "-m", "accelerate.commands.launch"]
        argv += ["--config_file", str(ROOT / f"profiles/{profile}.yaml"), "--num_processes", str(ranks)]
        argv += [
            "--main_process_port",
            str(free_port()),
            str(Path(__file__).with_name("limited_worker.py")),
            str(file),
        ]
        began = time.time()
        with (self.work / f"{name}.log").open("w", encoding="utf-8") as log:
            status = subprocess.run(
                argv,
                env={**os.environ, "ALLRANKS_BENCH": json.dumps(wanted)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        entry = {"profile": profile, "ranks": ranks, "exit": status, "seconds": round(time.time() - began, 1)}
        self.runs.append(entry)
        entry |= self._measured(self.work / "runs" / name, range(ranks), Path(wanted["moments"]))
        print(json.dumps(entry), flush=True)

    def _measured(self, run_dir: Path, ranks: range, moments: Path) -> dict[str, Any]:
        """Where each failure was, and the time to the retry, to the finished step, or to the stop of all ranks."""
        events = [event for rank in ranks for event in _events(run_dir, rank)]
        noted = [
            json.loads(line)
            for rank in ranks
            if (file := moments.with_name(f"{moments.name}.rank{rank}")).exists()
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
        ooms = sorted(note["time"] for note in noted if "OutOfMemoryError" in note.get("error", ""))
        commits = {e["step"]: e["time"] for e in events if e["kind"] == "step"}
        cases = []
        for failure in (event for event in events if event["kind"] == "failure"):
            case = {key: failure[key] for key in ("rank", "step", "phase", "failure", "attempt")}
            case["samples"] = len(failure["sample_ids"])
            at = max((moment for moment in ooms if moment <= failure["time"]), default=failure["time"])
            retries = [e["time"] for e in events if e["kind"] == "retry" and e["time"] >= at]
            stops = [e["time"] for e in events if e["kind"] == "stop" and e["time"] >= at]
            if retries and failure["step"] in commits:
                case["seconds_from_oom_to_retry"] = round(min(retries) - at, 3)
                case["seconds_from_oom_to_finished_step"] = round(commits[failure["step"]] - at, 3)
            elif stops:
                case["seconds_from_oom_to_stop_of_all_ranks"] = round(max(stops) - at, 3)
            cases.append(case)
        steps = [e for e in events if e["kind"] == "step" and e["rank"] == 0]
        disturbed = {case["step"] for case in cases}
        calm = [e["seconds"] for e in steps if e["step"] not in disturbed and e["step"] > 1]
        logs = [e for e in events if e["kind"] == "log"]
        return {
            "squeezed": [{k: note[k] for k in ("squeezed", "limit_bytes")} for note in noted if "squeezed" in note],
            "failures": cases,
            "caps_by_step": [e["caps"] for e in steps],
            "median_seconds_of_undisturbed_steps": round(statistics.median(calm), 3) if calm else None,
            "peak_bytes_by_rank": logs[-1]["peak_bytes"] if logs else None,
            "verdict": json.loads((run_dir / "verdict.json").read_text(encoding="utf-8")),
        }


def _events(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    with (run_dir / "events" / f"rank{rank}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare_logits(work: Path) -> dict[str, float]:
    """Largest difference of each profile's probe logits from `ddp`'s, and the standard deviation of those."""
    from safetensors.torch import load_file

    found = {file.stem: load_file(file)["logits"] for file in sorted(work.glob("*.logits"))}
    expected = found["ddp"]
    return {"std": float(expected.std()), **{n: float((t - expected).abs().max()) for n, t in found.items()}}


def main() -> None:
    """Run all cases of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "smollm2"], required=True)
    parser.add_argument("--model", type=Path, help="folder of the model; default: made with random weights")
    parser.add_argument("--profiles", default="ddp,zero2,zero3,fsdp")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-bench"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.work / arguments.shape
    work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or arguments.work / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    make_set(work / "train.jsonl", chars_per_token=CHARS_PER_TOKEN[arguments.shape])
    bench = Bench(model, work, LONG_TOKENS)
    from allranks.train.versions import versions

    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"one-card-{arguments.shape}.json"
    cases: list[tuple[str, list[str]]] = []
    for profile in arguments.profiles.split(","):
        phases = [["forward"], ["backward"]] if profile in STOPPING else [["forward", "backward"]]
        cases += [(profile, each) for each in phases]
    for profile, phases in cases:
        try:
            bench.run(profile, phases)
        except Exception:
            traceback.print_exc()
            bench.runs.append({"profile": profile, "broken": traceback.format_exc()})
        result = {
            "command": "python " + " ".join(sys.argv),
            "versions": versions(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "runs": bench.runs,
            "largest_logit_difference_from_ddp": compare_logits(work) if (work / "ddp.logits").exists() else None,
        }
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["largest_logit_difference_from_ddp"]))


if __name__ == "__main__":
    main()
