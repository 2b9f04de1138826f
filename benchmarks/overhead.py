"""What guard, votes, heartbeats and bookkeeping cost an undisturbed run: with and without them in turn, in one run.

    python benchmarks/overhead.py --shape llama3-8b --profile single --batch 8 --tokens 2000 --out benchmarks/results
    python benchmarks/overhead.py --shape llama3-8b --profile ddp --out benchmarks/results

In every other step the worker's attempts, votes, failure flag, progress page and liveness thread are taken out and only
its forward, backward, reduction and optimizer step are left. The result is the ratio of neighbouring steps, with the
95 % confidence interval of its median. With one rank the main thread's time in the coordinator's code is taken as well.

With two ranks (on one GPU over gloo if there is one card) there is a third kind of step, in which the ranks wait for
each other just before each vote, so that the vote alone is timed; of each vote the shortest time of all ranks counts,
which is that of the one that came last and waited for no other. Writes one JSON file.

    python benchmarks/overhead.py --shape llama3-8b --of history --block 5 --out benchmarks/results

measures `oom.memory_history` in the same way, with and without the record of the allocator's last 100,000 events, in
blocks of steps of which the first is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
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
WARM_UP_STEPS = 10


def kind_of(step: int, block: int, ranks: int) -> str:
    """With and without in turn, in blocks of `block` steps; of several ranks, timed votes after each two pairs."""
    order = ("with", "without", "without", "with", *(("timed",) if ranks > 1 else ()))
    return order[(step - 1) // block % len(order)]


class Worker:
    """Patches of the real worker on one rank."""

    def __init__(self, out: Path, block: int) -> None:
        self.out = out.with_name(f"{out.name}.rank{os.environ.get('RANK', '0')}")
        self.block, self.ranks = block, int(os.environ.get("WORLD_SIZE", "1"))
        self.kind = ""
        self.votes: list[float] = []
        self.commits: list[tuple[int, str, float, float]] = []
        self.coordinating_s = 0.0

    def kind_of(self, step: int) -> str:
        return kind_of(step, self.block, self.ranks)

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
            self.commits.append((step, self.kind_of(step), time.perf_counter(), self.coordinating_s))
            self.coordinating_s = 0.0
            self.out.write_text(json.dumps({"votes": self.votes, "commits": self.commits}), encoding="utf-8")
            also(self.kind_of(step + 1))

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
            self.kind = self.kind_of(number)
            if self.kind != "without":
                return self.all_but(
                    work, lambda inner: together(ctx, phase, number, inner, collective=collective), ctx.flag
                )
            at = Attempt(key=ctx.key(phase, number, 0), phase=phase, entered=lambda *_: None)
            raised, ctx.flag.leave_if_raised = ctx.flag.leave_if_raised, lambda _key: None
            value = work(at)
            ctx.flag.leave_if_raised = raised
            fine = Ballot(committed_step=ctx.committed_step, caps_fingerprint=0)
            return value, Tally(ballots=(fine,) * ctx.world_size)

        def bare_half_done(ctx: Any, phase: str, number: int, work: Any) -> Any:
            if self.kind == "without":
                return work()
            return self.all_but(work, lambda inner: half_done(ctx, phase, number, inner))

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

    def all_but(self, work: Any, guarded: Any, flag: Any = None) -> Any:
        """What `guarded` takes beside `work`, and what `work` itself does for the coordinator, is the coordinator's."""
        working_s = 0.0

        def noted(*at: Any) -> Any:
            nonlocal working_s
            if at:
                at[0].entered = self.clocked(at[0].entered)
                flag.leave_if_raised = self.clocked(type(flag).leave_if_raised.__get__(flag))
            began = time.perf_counter()
            value = work(*at)
            working_s += time.perf_counter() - began
            return value

        began = time.perf_counter()
        value = guarded(noted)
        self.coordinating_s += time.perf_counter() - began - working_s
        return value

    def clocked(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            value = call(*arguments)
            self.coordinating_s += time.perf_counter() - began
            return value

        return timed

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

    of, block, out = os.environ["ALLRANKS_BENCH"].split(":", maxsplit=2)
    Worker(Path(out), int(block)).patch(of)
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


def summary(noted: dict[str, Any], block: int, ranks: int) -> dict[str, Any]:
    """Ratios of neighbouring blocks, with by without."""
    commits = noted["commits"]
    took = {step: at - before for (step, _, at, _), (_, _, before, _) in zip(commits[1:], commits, strict=False)}
    last = max(took)
    medians = []
    for first in range(1, last - block + 2, block):
        steps = range(first + (block > 1), first + block)
        if first > WARM_UP_STEPS:
            medians.append((kind_of(first, block, ranks), statistics.median(took[step] for step in steps)))
    ratios = []
    for (kind, mine), (other, theirs) in pairwise(medians):
        if {kind, other} == {"with", "without"}:
            ratios.append(mine / theirs if kind == "with" else theirs / mine)
    told = {
        "seconds_of_a_step": {
            kind: round(statistics.median(s for k, s in medians if k == kind), 4) for kind in ("with", "without")
        },
        "pairs": len(ratios),
        "overhead_percent_median": round(100 * (statistics.median(ratios) - 1), 3),
        "overhead_percent_confidence_95": [round(100 * (bound - 1), 3) for bound in confidence(ratios)],
    }
    inside = [(of, took[step]) for step, kind, _, of in commits if kind == "with" and step > WARM_UP_STEPS]
    if ranks == 1 and any(of for of, _ in inside):
        told["main_thread_in_the_coordinator_milliseconds_a_step"] = round(
            1000 * statistics.median(of for of, _ in inside), 3
        )
        told["main_thread_in_the_coordinator_percent"] = round(
            100 * statistics.median(of / whole for of, whole in inside), 4
        )
    return told


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, from the order of the values alone (sign test)."""
    ordered, n = sorted(values), len(values)
    below = 0  # values that may be cut off at either end
    while sum(math.comb(n, k) for k in range(below + 1)) / 2**n <= 0.025:
        below += 1
    cut = max(0, below - 1)
    return ordered[cut], ordered[n - 1 - cut]


def main() -> None:
    """Make the model, run it, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--of", choices=("coordinator", "history"), default="coordinator")
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--block", type=int, default=1, help="steps of one kind in a row")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, one micro-batch on each rank")
    parser.add_argument("--tokens", type=int, default=1000, help="of each sample, about")
    parser.add_argument("--work", type=Path, default=Path("/tmp/allranks-bench"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.work / f"overhead-{arguments.shape}"
    work.mkdir(parents=True, exist_ok=True)
    model = arguments.work / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        make_model(arguments.shape, model)
    ranks = 1 if arguments.profile == "single" else 2
    steps = WARM_UP_STEPS + (arguments.pairs // 2) * (4 + (ranks > 1)) * arguments.block
    make_even_set(work / "train.jsonl", samples=64, tokens=arguments.tokens)
    config = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(work / "train.jsonl"), "max_length": arguments.tokens + 8},
        "training": {
            "global_batch_size": arguments.batch,
            "per_device_train_batch_size": arguments.batch // ranks,
            "num_train_epochs": 1_000_000,
            "max_steps": steps,
            "logging_steps": steps,
        },
        "output": {"dir": str(work / "runs"), "name": f"{arguments.profile}-{os.getpid()}", "save_steps": None},
    }
    file_of_run = work / "run.yaml"
    file_of_run.write_text(yaml.safe_dump(config), encoding="utf-8")
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    argv += ["--config_file", str(ROOT / f"profiles/{arguments.profile}.yaml"), "--num_processes", str(ranks)]
    argv += ["--main_process_port", str(free_port()), str(Path(__file__).resolve()), str(file_of_run)]
    noted = work / "noted"
    asked = {**os.environ, "ALLRANKS_BENCH": f"{arguments.of}:{arguments.block}:{noted}"}
    subprocess.run(argv, env=asked, check=True, cwd=work)
    from allranks.train.versions import versions

    told = [json.loads(noted.with_name(f"noted.rank{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    result = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "profile": arguments.profile,
        "ranks": {str(rank): summary(each, arguments.block, ranks) for rank, each in enumerate(told)},
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
