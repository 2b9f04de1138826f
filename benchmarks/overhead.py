"""What guard, votes, heartbeats and bookkeeping cost an undisturbed run: with and without them in turn, in one run.

    python benchmarks/overhead.py --shape llama3-8b --profile ddp --pairs 12 --out benchmarks/results

Two ranks (on one GPU over gloo if there is one card) train in blocks of steps. In every other block the worker's
attempts, votes, failure flag, progress page and liveness thread are taken out and only its forward, backward, reduction
and optimizer step are left. The result is the ratio of neighbouring blocks. In a third kind of block the ranks wait for
each other just before each vote, so that the vote alone is timed; of each vote the shortest time of all ranks counts,
which is that of the one that came last and waited for no other. With `--profile single` there are no votes, and no
second process that shares the card. Writes one JSON file.

    python benchmarks/overhead.py --shape llama3-8b --of history --out benchmarks/results

measures `oom.memory_history` in the same way: with and without the record of the allocator's last 100,000 events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_one_card import SHAPES, free_port, make_even_set, make_model

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 5
"""Steps; the first of each is not counted."""
KINDS = ("with", "without", "timed")


def kind_of(step: int) -> str:
    """With and without in turn, and at the end of each two pairs a block with timed votes."""
    return ("with", "without", "without", "with", "timed")[(step - 1) // BLOCK % 5]


class Worker:
    """Patches of the real worker on one rank."""

    def __init__(self, out: Path) -> None:
        self.out = out.with_name(f"{out.name}.rank{os.environ.get('RANK', '0')}")
        self.kind = ""
        self.votes: list[float] = []
        self.commits: list[tuple[int, str, float]] = []

    def patch(self, of: str) -> None:
        """Put switches into the loop."""
        if of == "history":
            self.note_commits(self.record_history)
        else:
            self.note_commits()
            self.patch_coordinator()

    def note_commits(self, also: Callable[[str], None] = lambda _kind: None) -> None:
        """Write down when each step was committed, and tell `also` the kind of the next one."""
        from allranks.train import loop

        commit = loop._commit

        def noted_commit(ctx: Any, job: Any, ids: Any, reduced: Any, *, seconds: float) -> None:
            commit(ctx, job, ids, reduced, seconds=seconds)
            if ctx.rank.device.type == "cuda":
                torch.cuda.synchronize()
            step = job.position.step
            self.commits.append((step, kind_of(step), time.perf_counter()))
            self.out.write_text(json.dumps({"votes": self.votes, "commits": self.commits}), encoding="utf-8")
            also(kind_of(step + 1))

        loop._commit = noted_commit  # type: ignore[assignment]

    def record_history(self, kind: str) -> None:
        """As `allranks.train.snapshot` does it, from the next step on."""
        if kind != self.kind and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(
                enabled="all" if kind == "with" else None, context="alloc", stacks="python", max_entries=100_000
            )
        self.kind = kind

    def patch_coordinator(self) -> None:
        """Put switches where the loop calls the coordinator."""
        from allranks.coordinator.ballots import Ballot, StepTally, Tally
        from allranks.coordinator.liveness import Liveness
        from allranks.train import loop, step
        from allranks.train.together import Attempt

        together, half_done, vote_two = step.together, step.half_done, step.vote_two
        vote_one = sys.modules["allranks.train.together"].vote_one
        look, notice = Liveness._look, Liveness._notice

        def bare_together(ctx: Any, phase: Any, number: int, work: Any, *, collective: bool = False) -> Any:
            self.kind = kind_of(number)
            if self.kind != "without":
                return together(ctx, phase, number, work, collective=collective)
            at = Attempt(key=ctx.key(phase, number, 0), phase=phase, entered=lambda *_: None)
            raised, ctx.flag.leave_if_raised = ctx.flag.leave_if_raised, lambda _key: None
            value = work(at)
            ctx.flag.leave_if_raised = raised
            fine = Ballot(committed_step=ctx.committed_step, caps_fingerprint=0)
            return value, Tally(ballots=(fine,) * ctx.world_size)

        def bare_half_done(ctx: Any, phase: str, number: int, work: Any) -> Any:
            return work() if self.kind == "without" else half_done(ctx, phase, number, work)

        def bare_vote_two(control: Any, ballot: Any) -> Any:
            if self.kind == "without":
                return StepTally(ballots=(ballot,) * control.world_size)
            return self.timed(control, lambda: vote_two(control, ballot))

        def bare_look(liveness: Any, store: Any, passed_s: float) -> Any:
            return None if self.kind == "without" else look(liveness, store, passed_s)

        def bare_notice(liveness: Any) -> Any:
            return liveness._pulse.place() if self.kind == "without" else notice(liveness)

        step.together, step.half_done, step.vote_two = bare_together, bare_half_done, bare_vote_two  # type: ignore[assignment]
        loop.half_done = bare_half_done  # type: ignore[attr-defined]
        Liveness._look, Liveness._notice = bare_look, bare_notice  # type: ignore[method-assign,assignment]
        sys.modules["allranks.train.together"].vote_one = lambda control, ballot: self.timed(  # type: ignore[attr-defined]
            control, lambda: vote_one(control, ballot)
        )

    def timed(self, control: Any, vote: Any) -> Any:
        """The vote alone, after all ranks have come to it."""
        if self.kind != "timed":
            return vote()
        control.exchange([0.0], topic=9)
        began = time.perf_counter()
        tally = vote()
        self.votes.append(time.perf_counter() - began)
        return tally


def worker() -> None:
    """Run one rank."""
    from allranks.train.__main__ import main as real

    of, _, out = os.environ["ALLRANKS_BENCH"].partition(":")
    Worker(Path(out)).patch(of)
    real(sys.argv[1:])


def votes_of(noted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of both votes of a step together, waiting for slower peers left out."""
    shortest = [min(same) for same in zip(*(of["votes"] for of in noted), strict=True)]
    steps = [1000 * (one + two) for one, two in zip(shortest[::2], shortest[1::2], strict=True)]
    return {
        "steps": len(steps),
        "milliseconds_a_step_median": round(statistics.median(steps), 3),
        "milliseconds_a_step_quartiles": [round(q, 3) for q in statistics.quantiles(steps, n=4)],
    }


def summary(noted: dict[str, Any]) -> dict[str, Any]:
    """Ratios of neighbouring blocks, with by without."""
    blocks: list[tuple[str, list[float]]] = []
    commits = noted["commits"]
    for (step, kind, at), (_, earlier_kind, before) in zip(commits[1:], commits, strict=False):
        if (step - 1) % BLOCK == 0 or kind != earlier_kind:
            if (step - 1) % BLOCK == 0:
                blocks.append((kind, []))
            continue
        if blocks:
            blocks[-1][1].append(at - before)
    medians = [(kind, statistics.median(seconds)) for kind, seconds in blocks if len(seconds) == BLOCK - 1]
    ratios = []
    for (kind, mine), (other, theirs) in pairwise(medians):
        if {kind, other} == {"with", "without"}:
            ratios.append(mine / theirs if kind == "with" else theirs / mine)
    return {
        "seconds_of_a_step": {
            kind: round(statistics.median(s for k, s in medians if k == kind), 4) for kind in ("with", "without")
        },
        "pairs": len(ratios),
        "overhead_percent_median": round(100 * (statistics.median(ratios) - 1), 3),
        "overhead_percent_quartiles": [round(100 * (q - 1), 3) for q in statistics.quantiles(ratios, n=4)],
    }


def main() -> None:
    """Make the model, run it, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--of", choices=("coordinator", "history"), default="coordinator")
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1000, help="of each sample, about")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-bench"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.work / f"overhead-{arguments.shape}"
    work.mkdir(parents=True, exist_ok=True)
    model = arguments.work / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    steps = (arguments.pairs // 2) * 5 * BLOCK
    make_even_set(work / "train.jsonl", samples=64, tokens=arguments.tokens)
    config = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(work / "train.jsonl"), "max_length": arguments.tokens + 8},
        "training": {
            "global_batch_size": 4,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1_000_000,
            "max_steps": steps,
            "logging_steps": steps,
        },
        "output": {"dir": str(work / "runs"), "name": f"{arguments.profile}-{os.getpid()}", "save_steps": None},
    }
    file_of_run = work / "run.yaml"
    file_of_run.write_text(yaml.safe_dump(config), encoding="utf-8")
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    ranks = 1 if arguments.profile == "single" else 2
    argv += ["--config_file", str(ROOT / f"profiles/{arguments.profile}.yaml"), "--num_processes", str(ranks)]
    argv += ["--main_process_port", str(free_port()), str(Path(__file__).resolve()), str(file_of_run)]
    noted = work / "noted"
    subprocess.run(argv, env={**os.environ, "ALLRANKS_BENCH": f"{arguments.of}:{noted}"}, check=True, cwd=work)
    from allranks.train.versions import versions

    told = [json.loads(noted.with_name(f"noted.rank{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    result = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "profile": arguments.profile,
        "ranks": {str(rank): summary(each) for rank, each in enumerate(told)},
        "both_votes": votes_of(told) if ranks > 1 and told[0]["votes"] else None,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"overhead-{arguments.of}-{arguments.shape}-{arguments.profile}.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("ranks", "both_votes")}, indent=1))


if __name__ == "__main__":
    if "ALLRANKS_BENCH" in os.environ:
        worker()
    main()
