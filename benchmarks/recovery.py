"""Many out-of-memory failures in one run: does it end, lose nothing, how long does each take, what stays reserved.

    python benchmarks/recovery.py --profiles ddp,zero2,zero3,fsdp --faults 20 --out benchmarks/results

One run of `allranks drill` per profile, all at the same time, of two ranks each; they share the GPU, over gloo, if
there is only one. The faults are `alloc`, the allocator's own refusal of a request for more than the device has, in
forward, backward and the optimizer step in turn, on either rank, `--apart` steps from one another: four failures in
forward or backward within 100 steps would be called a leak. With `--one-by-one` the runs follow each other and the
times mean something: seconds from the fault to the retry, or until the ranks that were started again begin a step, as a
multiple of the cold start of the same run up to its first step. (The step itself is left out: its micro-batches are
smaller then and more.) The moment of a fault is that of the mark which the injector leaves just before it: these times
hold the handling of the exception and the snapshot of the memory. Writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_one_card import SHAPES, make_model

from allranks.demo.tiny import write_tiny_set
from allranks.events import read_events
from allranks.lineage import committed
from allranks.train.versions import versions

PHASES = ("forward", "backward", "step")
SHAPES["small"] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def faults(count: int, first: int, apart: int) -> list[dict[str, Any]]:
    """The planned faults, on each rank and in each phase in turn."""
    return [
        {"rank": number % 2, "step": first + number * apart, "phase": PHASES[number % 3], "kind": "alloc"}
        for number in range(count)
    ]


def run(
    profile: str, planned: list[dict[str, Any]], model: Path, work: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One run with all faults, and what its events tell."""
    steps = planned[-1]["step"] + arguments.apart
    config = {
        "model": {"name_or_path": str(model)},
        "lora": {"r": 8},
        "data": {"train": str(work / "train.jsonl"), "max_length": 128},
        "training": {
            "global_batch_size": arguments.batch,
            "per_device_train_batch_size": max(1, arguments.batch // 2),
            "num_train_epochs": 1_000_000,
            "max_steps": steps,
        },
        "oom": {"max_respawns": 10 * len(planned)},
        "output": {"dir": str(work / "runs"), "name": profile, "save_steps": arguments.save_steps},
    }
    run_dir = work / "runs" / f"{profile}-drill"
    shutil.rmtree(run_dir, ignore_errors=True)
    file = work / f"{profile}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    argv = [str(Path(sys.executable).with_name("allranks")), "drill", str(file), "--profile", profile]
    argv += ["--gpus", "2"]
    for fault in planned:
        argv += ["--inject", ",".join(f"{key}={value}" for key, value in fault.items())]
    began = time.time()
    with (work / f"{profile}.log").open("w", encoding="utf-8") as log:
        try:
            status: int | str = subprocess.run(
                argv, stdout=log, stderr=subprocess.STDOUT, timeout=arguments.limit_s, check=False, cwd=work
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not ended after {arguments.limit_s:.0f} s"
    if not (run_dir / "events" / "rank1.jsonl").exists():
        return {
            "profile": profile,
            "exit": status,
            "said": (work / f"{profile}.log").read_text(encoding="utf-8")[-2000:],
        }
    return {"profile": profile, "exit": status, **measured(run_dir, planned, steps, began)}


def measured(run_dir: Path, planned: list[dict[str, Any]], steps: int, began: float) -> dict[str, Any]:
    """What became of the faults, from the events of both ranks."""
    by_rank = [list(read_events(run_dir, rank)) for rank in range(2)]
    main = by_rank[0]
    steps_begun = [event["time"] - event["seconds"] for event in main if event["kind"] == "step"]
    cold_start_s = steps_begun[0] - began if steps_begun else None
    retries, restarts, finished = [], [], []
    for mark in sorted((run_dir / "injected").glob("L*/*"), key=lambda mark: mark.stat().st_mtime):
        at = mark.stat().st_mtime
        later = [event for event in main if event["time"] >= at]
        answer = next((event for event in later if event["kind"] in ("retry", "respawn", "stop")), None)
        if answer is None:
            continue
        again = next((event for event in later if event["kind"] == "step" and event["time"] > answer["time"]), None)
        if again is None:
            continue
        phase = planned[int(mark.name.partition("-")[0])]["phase"]
        if answer["kind"] == "retry":
            retries.append((phase, answer["time"] - at))
            finished.append((phase, again["time"] - at))
        elif answer["kind"] == "respawn":
            restarts.append((phase, again["time"] - again["seconds"] - at))
    verdict_file = run_dir / "verdict.json"
    return {
        "verdict": json.loads(verdict_file.read_text(encoding="utf-8")) if verdict_file.exists() else None,
        "faults_planned": len(planned),
        "failures": sum(1 for mine in by_rank for event in mine if event["kind"] == "failure"),
        "retries": len(retries),
        "restarts": len(restarts),
        "growths": sum(1 for event in main if event["kind"] == "caps"),
        "seconds_from_fault_to_retry": _by_phase(retries),
        "seconds_from_fault_to_the_step_after_a_retry": _by_phase(finished),
        "seconds_from_fault_until_a_step_begins_after_a_restart": _by_phase(restarts),
        "seconds_of_the_cold_start_until_a_step_begins": None if cold_start_s is None else round(cold_start_s, 2),
        "restart_as_a_multiple_of_the_cold_start": _by_phase([(p, each / cold_start_s) for p, each in restarts])
        if cold_start_s
        else None,
        "seconds_of_a_step": _spread([e["seconds"] for e in main if e["kind"] == "step"]),
        "most_reserved_after_the_first_fault_over_before": _reserved(main, planned),
        "samples": audit(main, by_rank, steps),
    }


def _by_phase(seconds: list[tuple[str, float]]) -> dict[str, dict[str, float] | None]:
    return {phase: _spread([each for of, each in seconds if of == phase]) for phase in PHASES}


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "least": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "most": round(max(values), 3),
    }


def _reserved(main: list[dict[str, Any]], planned: list[dict[str, Any]]) -> float | None:
    """Over the ranks: what was reserved at most after the first fault, by what was at most before it."""
    logs = [event for event in main if event["kind"] == "log"]
    first = min(fault["step"] for fault in planned)
    before = [event["reserved_bytes"] for event in logs if event["step"] < first]
    after = [event["reserved_bytes"] for event in logs if event["step"] > first]
    if not before or not after:
        return None
    return round(max(max(row[rank] for row in after) / max(row[rank] for row in before) for rank in range(2)), 4)


def audit(main: list[dict[str, Any]], by_rank: list[list[dict[str, Any]]], steps: int) -> str:
    """Whether each committed step took its global batch exactly once over both ranks, and no step is missing."""
    kept = committed(main, "step")
    if [event["step"] for event in kept] != list(range(1, steps + 1)):
        return f"{len(kept)} of {steps} steps were committed"
    taken: list[dict[int, list[int]]] = [
        {event["step"]: [i for micro in event["micro_batches"] for i in micro] for event in committed(mine, "step")}
        for mine in by_rank
    ]
    for event in kept:
        both = sorted(i for mine in taken for i in mine.get(event["step"], []))
        if both != sorted(event["sample_ids"]):
            return f"step {event['step']} took {both} of {sorted(event['sample_ids'])}"
    return "each committed step took its global batch exactly once"


def main() -> None:
    """Run all profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--profiles", default="ddp,zero2,zero3,fsdp")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--first", type=int, default=10, help="step of the first fault, when the caches are warm")
    parser.add_argument("--apart", type=int, default=26, help="steps from one fault to the next")
    parser.add_argument("--save-steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step; half of them in a micro-batch")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of each run")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-recovery"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work: Path = arguments.work / arguments.shape
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    write_tiny_set(work / "train.jsonl", samples=400, seed=1)
    planned = faults(arguments.faults, arguments.first, arguments.apart)
    profiles = arguments.profiles.split(",")
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"recovery-{arguments.shape}{'-one-by-one' if arguments.one_by_one else ''}.json"
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "faults": planned,
        "runs": [],
    }
    with ThreadPoolExecutor(max_workers=1 if arguments.one_by_one else len(profiles)) as pool:
        begun = [pool.submit(run, each, planned, model, work, arguments) for each in profiles]
        for ended in as_completed(begun):
            result["runs"].append(ended.result())
            print(json.dumps(ended.result()), flush=True)
            target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
