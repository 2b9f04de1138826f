"""SIGKILL of a whole job, launcher and ranks, while it loads, steps or saves: the same command resumes.

Kinds and moments are drawn from a seed. A kill counts only if the job was alive to be killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from allranks.checkpoints.store import CheckpointStore
from allranks.events import read_events
from runs import Finished, command, config_of, environment, launch

STEPS = 40
SAVE_STEPS = 3
DEADLINE_S = 90.0
CHILDREN_S = 60.0
_LOOK_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A drawn moment.

    Attributes:
        during: ``step``: some time after the step `after` was committed; ``save``: when a checkpoint that is not
            published yet lies beside the others; ``load``: some time after the start, before the first step.
        after: least committed step.
        delay_s: waited from there on.
    """

    during: str
    after: int
    delay_s: float


def _drawn(kills: int, seed: int) -> list[Kill]:
    """Moments in the order of the run, each kind as often as the others; there is a save before and after each."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(SAVE_STEPS + 1, STEPS - 4 * SAVE_STEPS), kills))
    kinds = ["step", "save", "load"] * (kills // 3 + 1)
    # A load is killed only in a launch that has something to resume.
    kinds = [kinds[0], *rng.sample(kinds[1:kills], kills - 1)] if kills > 1 else ["save"]
    longest = {"step": 0.2, "save": 0.01, "load": 9.0}
    return [
        Kill(during=kind, after=step, delay_s=rng.uniform(0, longest[kind]))
        for kind, step in zip(kinds, steps, strict=True)
    ]


def _until(there: Callable[[], bool], job: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not there():
        assert job.poll() is None, f"the job ended before it was killed:\n{log.read_text()}"
        assert time.monotonic() < until, f"nothing to kill after {DEADLINE_S} s:\n{log.read_text()}"
        time.sleep(_LOOK_S)


def _steps(run_dir: Path, launch_no: int) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir) if e["kind"] == "step" and e["launch"] == launch_no]


def _wait_for(kill: Kill, job: subprocess.Popen[bytes], run_dir: Path, launch_no: int, log: Path) -> None:
    began = time.monotonic()
    if kill.during == "load":
        _until(lambda: time.monotonic() > began + kill.delay_s or bool(_steps(run_dir, launch_no)), job, log)
        return
    _until(lambda: any(e["step"] >= kill.after for e in _steps(run_dir, launch_no)), job, log)
    store = CheckpointStore(run_dir, keep=2)
    if kill.during == "save":
        pointer = store.folder / "latest.json"
        _until(
            lambda: any(f.name not in pointer.read_text() for f in store.folder.glob("step-*")),
            job,
            log,
        )
    time.sleep(kill.delay_s)


def _kill_all(job: subprocess.Popen[bytes], run_dir: Path) -> None:
    launcher = psutil.Process(job.pid)
    everyone = [launcher]
    try:
        until = time.monotonic() + CHILDREN_S  # a loaded machine may not have let it start anything yet
        while job.poll() is None and not launcher.children() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if job.poll() is None:
            launcher.suspend()  # so that it starts and ends nothing while its descendants are counted
            everyone += launcher.children(recursive=True)
    finally:
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    job.wait(timeout=30)
    _, alive = psutil.wait_procs(everyone, timeout=30)
    left = _processes_of(run_dir)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert (alive, left) == ([], [])
    assert len(everyone) > 1, "there was no job to kill"


def _processes_of(run_dir: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or ())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


def _config(model: Path, folder: Path, name: str) -> dict[str, Any]:
    return config_of(model, folder, output__name=name, output__save_steps=SAVE_STEPS, training__max_steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(_config(tiny_llama_dir, folder, "undisturbed"), folder, profile="single", ranks=1)
    assert run.status == 0, run.output
    assert sorted(run.committed()) == list(range(1, STEPS + 1))
    return run


def _update(run: Finished) -> torch.Tensor:
    tensors = run.tensors("adapter/adapter_model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if "lora_B" in name])


def _killed_again_and_again(
    profile: str, ranks: int, kills: list[Kill], undisturbed: Finished, model: Path, folder: Path
) -> None:
    name = f"{profile}-{len(kills)}"
    argv, run_dir = command(_config(model, folder, name), folder, profile=profile, ranks=ranks)
    store = CheckpointStore(run_dir, keep=2)
    resumed_at: list[int] = []
    for launch_no, kill in enumerate(kills, start=1):
        log = folder / f"{name}-{launch_no}.log"
        with (
            log.open("wb") as out,
            subprocess.Popen(argv, env=environment(), stdout=out, stderr=subprocess.STDOUT, cwd=folder) as job,
        ):
            try:
                _wait_for(kill, job, run_dir, launch_no, log)
            finally:
                _kill_all(job, run_dir)
        newest = store.latest()  # every byte of it verified
        assert newest is not None
        assert newest.step % SAVE_STEPS == 0
        assert newest.step >= (resumed_at[-1] if resumed_at else 0)
        resumed_at.append(newest.step)

    last = launch(_config(model, folder, name), folder, profile=profile, ranks=ranks)
    assert last.status == 0, last.output
    assert last.verdict["reason"] == "finished"
    assert _processes_of(run_dir) == []

    events = list(read_events(run_dir))
    for launch_no, step in enumerate(resumed_at, start=2):
        resumed = [e["step"] for e in events if e["kind"] == "resume" and e["launch"] == launch_no]
        # A launch that was killed while it loaded may not have come as far as to say so.
        assert resumed in ([step], []) if launch_no <= len(kills) and kills[launch_no - 1].during == "load" else [step]
        trained = [e["step"] for e in _steps(run_dir, launch_no)]
        assert trained == list(range(step + 1, step + 1 + len(trained)))
    steps = [event for event in events if event["kind"] == "step"]
    expected = undisturbed.committed()
    assert {event["step"] for event in steps} == set(expected)
    for event in steps:  # steps of an abandoned lineage too
        assert event["sample_ids"] == expected[event["step"]], f"launch {event['launch']}, step {event['step']}"
    found = Finished(run_dir=run_dir, status=0, output="")
    assert float((_update(found) - _update(undisturbed)).norm() / _update(undisturbed).norm()) < 2e-2


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("profile", "ranks", "kills"), [("single", 1, 4), ("ddp", 2, 1)])
def test_a_job_killed_at_any_moment_resumes(
    profile: str, ranks: int, kills: int, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    _killed_again_and_again(profile, ranks, _drawn(kills, 1), undisturbed, tiny_llama_dir, folder)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("profile", "ranks", "kills"), [("single", 1, 15), ("ddp", 2, 5)])
def test_a_job_killed_twenty_times_resumes(
    profile: str, ranks: int, kills: int, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    _killed_again_and_again(profile, ranks, _drawn(kills, 2), undisturbed, tiny_llama_dir, folder)
