"""What a checkpoint costs the training loop: runs with a save every N steps against runs without, in turns.

    python benchmarks/save_cost.py --shape tiny --profile ddp --ranks 2 --out benchmarks/results

Works on CPU ranks and on GPUs alike. A step counts from the commit before it to its own, so that whatever a save takes
from the loop is in it; the first steps of a run and its last save, for which the run waits, are left out. What a save
adds is also found within a run: by how much the steps in which it is begun and written exceed the median of the others.
Prints one JSON object, and writes it with the command and the versions to a file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_one_card import SHAPES, make_even_set, make_model

from allranks.events import read_events
from allranks.train.versions import versions

WARM_UP_STEPS = 5
AFTER_A_SAVE = 5
"""Steps in which a save is begun, gathered and written, at most."""
INTERVAL_STEPS = 50
"""Steps from one save to the next to which its cost is related."""
GLOBAL_BATCH = 8
TIMEOUT_S = 1800


def config_of(arguments: argparse.Namespace, model: Path, name: str, save_steps: int | None) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(model)},
        "lora": {"r": arguments.rank},
        "data": {"train": str(arguments.work / "train.jsonl"), "max_length": arguments.tokens + 8},
        "training": {"max_steps": arguments.steps, "global_batch_size": GLOBAL_BATCH},
        "output": {"dir": str(arguments.work / "runs"), "name": name, "save_steps": save_steps},
    }


def measured(arguments: argparse.Namespace, model: Path, name: str, save_steps: int | None) -> dict[str, Any]:
    """One run: the seconds of its steps, and what it said of its saves but for the last."""
    run_dir = arguments.work / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    file = arguments.work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config_of(arguments, model, name, save_steps)), encoding="utf-8")
    argv = [str(Path(sys.executable).with_name("allranks")), "run", str(file), "--profile", arguments.profile]
    argv += [] if arguments.profile == "single" else ["--gpus", str(arguments.ranks)]
    with (arguments.work / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=True)
    events = list(read_events(run_dir))
    commits = [event for event in events if event["kind"] == "step"]
    took = {after["step"]: after["time"] - before["time"] for before, after in pairwise(commits[WARM_UP_STEPS:])}
    saves = [event for event in events if event["kind"] == "save" and event["step"] < arguments.steps]
    near = {save["step"]: range(save["step"] + 1, save["step"] + 1 + AFTER_A_SAVE) for save in saves}
    calm = statistics.median(s for step, s in took.items() if not any(step in steps for steps in near.values()))
    for save in saves:
        save["added_s"] = sum(took[step] - calm for step in near[save["step"]] if step in took)
    wanted = ("seconds", "blocked_s", "added_s", "bytes")
    return {"steps": list(took.values()), "calm": calm, "saves": [{k: save[k] for k in wanted} for save in saves]}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all runs of one kind together."""
    steps = [seconds for run in runs for seconds in run["steps"]]
    saves = [save for run in runs for save in run["saves"]]
    told: dict[str, Any] = {
        "runs": len(runs),
        "steps": len(steps),
        "median_step_s": round(statistics.median(steps), 4),
        "mean_step_s": round(statistics.fmean(steps), 4),
        "median_step_s_by_run": [round(statistics.median(run["steps"]), 4) for run in runs],
    }
    if saves:
        told |= {
            "saves": len(saves),
            "checkpoint_bytes": saves[0]["bytes"],
            "median_save_s": round(statistics.median(save["seconds"] for save in saves), 4),
            "median_blocked_s": round(statistics.median(save["blocked_s"] for save in saves), 4),
            "largest_blocked_s": round(max(save["blocked_s"] for save in saves), 4),
            "median_added_s": round(statistics.median(save["added_s"] for save in saves), 4),
            f"percent_at_one_save_in_{INTERVAL_STEPS}_steps": round(
                100
                * statistics.median(save["added_s"] for save in saves)
                / (INTERVAL_STEPS * statistics.median(run["calm"] for run in runs)),
                3,
            ),
        }
    return told


def main() -> None:
    """Run both kinds in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="folder of a model, instead")
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=512, help="lora.r: decides the size of the checkpoint")
    parser.add_argument("--tokens", type=int, default=100, help="of each sample, about")
    parser.add_argument("--steps", type=int, default=175, help="of each run")
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-save-cost"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or arguments.work / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    make_even_set(arguments.work / "train.jsonl", samples=256, tokens=arguments.tokens)
    kinds: dict[str, list[dict[str, Any]]] = {"without_saves": [], "with_saves": []}
    for turn in range(arguments.turns):
        kinds["without_saves"].append(measured(arguments, model, f"without-{turn}", None))
        kinds["with_saves"].append(measured(arguments, model, f"with-{turn}", arguments.save_steps))
    result = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "save_steps": arguments.save_steps,
        **{kind: summary(runs) for kind, runs in kinds.items()},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"save-cost-{model.name.removeprefix('model-')}-{arguments.profile}.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
