"""A launcher like `allranks run`, with the stand-in for the ranks.

Run as ``drive_launch.py RUN_DIR KIND GRACE_S BEHAVIOUR [ARGUMENT]``.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from allranks import environment
from allranks.config.schema import DataConfig, ModelConfig, OomConfig, RunConfig
from allranks.errors import AllranksError
from allranks.launch.command import build_launch
from allranks.launch.local import run
from allranks.launch.logs import Console
from allranks.plan.plan import Plan
from allranks.rundir import launch_lock, next_launch

PROFILES = Path(__file__).resolve().parents[2] / "profiles"


def main(run_dir: Path, kind: str, grace_s: float, behaviour: list[str]) -> int:
    profile_file = PROFILES / f"{kind}.yaml"
    plan = Plan(
        name=run_dir.name,
        run_dir=str(run_dir),
        # Without restarts, but for the behaviours that are about them.
        config=RunConfig(
            model=ModelConfig(name_or_path="m"),
            data=DataConfig(train="t.jsonl"),
            oom=OomConfig(max_respawns=10 if behaviour[0].startswith("reborn") else 0),
        ),
        profile_kind=kind,  # type: ignore[arg-type]
        profile_file=str(profile_file),
        profile=yaml.safe_load(profile_file.read_text()),
        world_size=1 if kind == "single" else 2,
        device="cpu",
        mixed_precision="bf16",
        global_batch_size=8,
    )
    console = Console(sys.stdout)
    with launch_lock(run_dir):
        request = build_launch(
            plan,
            port=0,
            launch_no=next_launch(run_dir),
            environ=environment.inherited(),
            python=sys.executable,
            live_line=console.is_terminal,
        )
        argv = tuple("rank_stand_in" if word == "allranks.train" else word for word in request.argv)
        request = replace(request, argv=(*argv, *behaviour))
        try:
            outcome = run(request, run_dir, world_size=plan.world_size, console=console, grace_s=grace_s)
        except AllranksError as error:
            console.line(f"error: {error}")
            return error.exit_code
    for line in outcome.tail:
        console.line(f"tail: {line}")
    console.line(f"outcome: {outcome.message}")
    return outcome.exit_code


if __name__ == "__main__":
    # What is ignored stays so, and is inherited: tests in the background have SIGINT ignored, under nohup SIGHUP too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
