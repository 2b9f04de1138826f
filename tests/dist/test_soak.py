"""200 faults in one long run: nothing is lost, and neither the ranks nor the launcher grow.

Seconds per restart and figures of the processes are kept by `--keep-table FOLDER`, as ``soak_cpu.json`` there.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.coordinator.progress import read_pages
from allranks.events import read_events
from allranks.lineage import committed
from runs import Finished, command, config_of, environment

DEADLINE_S = 3000.0
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(DEADLINE_S + 300)]

SEED = 20
SAMPLES, GLOBAL_BATCH = 64, 8
STEPS, SAVED_EVERY, EVALUATED_EVERY = 2000, 20, 50
DEATHS_FROM, DEATHS_UNTIL = 800, 1400
"""Steps between which ranks die. Before and after them are two long lives, in which growth can be seen."""

RSS_GROWTH_BYTES = 8 * 2**20
"""Between a life's second quarter and its last one: 20 kB for each of the 400 steps from one to the other. The first
call found 0.9 to 1.6 MiB."""
LAUNCHER_GROWTH_BYTES = 4 * 2**20
"""Likewise, over the whole run: the launcher reads the logs as they grow and keeps a few lines. Found: 0.2 MiB."""
DESCRIPTORS_GROWTH = 2
"""A connection or file left open by each retry or restart would be 20 or more. Found: ranks 0, launcher 1."""
_LOOK_S = 0.5
_LONG_LIFE_LOOKS = 100


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the soak; no two of one step meet in one attempt, so each is told by itself."""

    rank: int
    step: int
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"rank={self.rank},step={self.step},phase={self.phase},kind={self.kind}"


def _faults() -> list[Fault]:
    """200 of them, drawn once and for all.

    Lacks of memory in training lie 50 steps apart, and so do those in evaluations: four of one of them within 100 steps
    would be called a leak, rightly.
    """
    rng = random.Random(SEED)

    def fault(step: int, phases: tuple[str, ...], kinds: tuple[str, ...]) -> Fault:
        return Fault(rank=rng.randrange(2), step=step, phase=rng.choice(phases), kind=rng.choice(kinds))

    memory, in_step = ("oom", "alloc"), ("forward", "backward")
    faults = [fault(50 * n + rng.randrange(1, 20), in_step, memory) for n in range(40)]
    faults += [fault(50 * n + rng.randrange(20, 40), in_step, ("error",)) for n in rng.sample(range(40), 30)]
    taken = {each.step for each in faults}
    faults += [fault(EVALUATED_EVERY * n, ("eval",), memory) for n in range(1, 41)]
    faults += [fault(SAVED_EVERY * n, ("save",), memory) for n in rng.sample(range(1, 101), 60)]
    deadly = ["exit"] * 12 + ["sigkill"] * 12 + ["sigstop"] * 6
    rng.shuffle(deadly)
    for first, kind in zip(range(DEATHS_FROM, DEATHS_UNTIL, SAVED_EVERY), deadly, strict=True):
        step = rng.choice([step for step in range(first + 1, first + SAVED_EVERY) if step not in taken])
        faults.append(fault(step, (*in_step, "vote", "reduce", "step"), (kind,)))
    return faults


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at one process: time, resident bytes, open descriptors, and the step it had committed."""

    at: float
    rss_bytes: int
    descriptors: int
    step: int


class Looks(threading.Thread):
    """Looks at the launcher and at the ranks of the generation that lives, twice a second, until `ended`.

    Attributes:
        launcher: of the launcher.
        lives: of each rank's process, by generation and rank.
    """

    def __init__(self, launcher: int, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.launcher: list[Look] = []
        self.lives: dict[tuple[int, int], list[Look]] = {}
        self.ended = threading.Event()
        self._launcher_pid = launcher
        self._run_dir = run_dir

    def run(self) -> None:
        generation = 0
        while not self.ended.wait(_LOOK_S):
            while read_pages(self._run_dir, launch=1, generation=generation + 1):
                generation += 1
            with suppress(psutil.Error):
                self.launcher.append(_look(self._launcher_pid, 0))
            for rank, page in read_pages(self._run_dir, launch=1, generation=generation).items():
                if page.committed_step:
                    with suppress(psutil.Error):
                        look = _look(page.pid, page.committed_step)
                        self.lives.setdefault((generation, rank), []).append(look)

    def long_lives(self) -> Iterator[tuple[str, list[Look]]]:
        for (generation, rank), looks in self.lives.items():
            if len(looks) >= _LONG_LIFE_LOOKS:
                yield f"g{generation}-rank{rank}", looks


def _look(pid: int, step: int) -> Look:
    process = psutil.Process(pid)
    return Look(at=time.time(), rss_bytes=process.memory_info().rss, descriptors=process.num_fds(), step=step)


def _growth(looks: list[Look]) -> dict[str, Any]:
    """From the second quarter, when all has been touched once, to the last."""
    quarter = len(looks) // 4
    early, late = looks[quarter : 2 * quarter], looks[-quarter:]
    return {
        "looks": len(looks),
        "steps": [looks[0].step, looks[-1].step],
        "seconds": round(looks[-1].at - looks[0].at),
        "rss_bytes": [round(statistics.median(look.rss_bytes for look in part)) for part in (early, late)],
        "descriptors": [max(look.descriptors for look in part) for part in (early, late)],
    }


def test_200_faults_lose_nothing_and_leave_nothing_behind(
    tiny_llama_dir: Path, tmp_path: Path, kept_tables: Path | None
) -> None:
    faults = _faults()
    assert len(faults) == 200
    _write_sets(tmp_path)
    config = config_of(
        tiny_llama_dir,
        tmp_path,
        training__max_steps=STEPS,
        training__learning_rate=2e-4,
        training__eval_steps=EVALUATED_EVERY,
        training__logging_steps=50,
        data__eval=str(tmp_path / "eval.jsonl"),
        output__save_steps=SAVED_EVERY,
        oom__hang_timeout_s=10.0,
        oom__max_respawns=1000,
    )
    argv, run_dir = command(config, tmp_path, profile="ddp", ranks=2, inject=tuple(map(str, faults)))
    began = time.monotonic()
    with (tmp_path / "console.txt").open("w") as console:
        launcher = subprocess.Popen(argv, env=environment(), cwd=tmp_path, stdout=console, stderr=subprocess.STDOUT)
        looks = Looks(launcher.pid, run_dir)
        looks.start()
        try:
            status = launcher.wait(DEADLINE_S)
        finally:
            launcher.kill()
            looks.ended.set()
            looks.join()
    run = Finished(run_dir=run_dir, status=status, output=(tmp_path / "console.txt").read_text())
    assert run.status == 0, run.output[-20_000:]
    assert run.verdict["reason"] == "finished"
    _audit(run)
    assert len(list(run_dir.glob("injected/L0001/*"))) == 200
    wanted = Counter("restart" if fault.kind in ("exit", "sigkill", "sigstop") else "in place" for fault in faults)
    found = {"in place": len(run.events("retry")), "restart": len(run.events("respawn"))}
    assert found == wanted

    grown = {name: _growth(life) for name, life in looks.long_lives()}
    figures = {
        "faults": Counter(f"{fault.phase} {fault.kind}" for fault in faults),
        **found,
        "steps": STEPS,
        "seconds": round(time.monotonic() - began),
        "launcher": _growth(looks.launcher),
        "lives": grown,
    }
    if kept_tables is not None:
        kept_tables.mkdir(parents=True, exist_ok=True)
        (kept_tables / "soak_cpu.json").write_text(json.dumps(figures, indent=1) + "\n")
    assert len(grown) == 4, "two long lives of two ranks"
    for name, figure in {**grown, "launcher": figures["launcher"]}.items():
        bound = LAUNCHER_GROWTH_BYTES if name == "launcher" else RSS_GROWTH_BYTES
        early, late = figure["rss_bytes"]
        assert late - early < bound, f"{name}: {figure}"
        early, late = figure["descriptors"]
        assert late - early <= DESCRIPTORS_GROWTH, f"{name}: {figure}"


def _write_sets(folder: Path) -> None:
    for name, samples in (("train", SAMPLES), ("eval", 11)):
        # Samples of nearly one length: then what failed at one sample had fitted before, and is taken once more.
        lines = [{"prompt": f"{n:02}:", "completion": "red green grey"[: 9 + n % 5]} for n in range(samples)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _audit(run: Finished) -> None:
    """Each epoch took each sample once, and each step's micro-batches on all ranks are its global batch."""
    lineages = [committed(read_events(run.run_dir, rank), "step") for rank in (0, 1)]
    assert [event["step"] for event in lineages[0]] == list(range(1, STEPS + 1))
    assert [event["step"] for event in lineages[1]] == list(range(1, STEPS + 1))
    planned = [event["sample_ids"] for event in lineages[0]]
    per_epoch = SAMPLES // GLOBAL_BATCH
    for first in range(0, STEPS, per_epoch):
        epoch = [sample for ids in planned[first : first + per_epoch] for sample in ids]
        assert sorted(epoch) == list(range(SAMPLES)), f"the epoch from step {first + 1}"
    for ids, *ranks in zip(planned, *lineages, strict=True):
        taken = [sample for event in ranks for micro in event["micro_batches"] for sample in micro]
        assert sorted(taken) == sorted(ids), f"step {ranks[0]['step']}"
