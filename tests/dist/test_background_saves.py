"""Checkpoints are written while training goes on: what is saved, what is told, and what a death in between costs.

The disk is made slow (tests/slow_disk), so that each write is certainly under way when the next steps are made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from allranks.checkpoints.published import described
from allranks.checkpoints.store import CheckpointRef, CheckpointStore, TrainState
from runs import Finished, command, config_of, environment, launch

pytestmark = pytest.mark.timeout(300)

DISK_S = 4.0
"""More than two steps take on a loaded machine."""
SLOW_DISK = Path(__file__).resolve().parents[1] / "slow_disk"


def slow_disk() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(SLOW_DISK), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "ALLRANKS_TEST_DISK_S": str(DISK_S)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("background")


def config(model: Path, folder: Path, name: str, *, steps: int, **changes: Any) -> dict[str, Any]:
    chosen = {
        "output__name": name,
        "output__save_steps": 2,
        "output__save_total_limit": 5,
        "training__max_steps": steps,
        **changes,
    }
    return config_of(model, folder, **chosen)


def checkpoint(run_dir: Path, step: int) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """The state of a checkpoint, and its tensors under one name each."""
    store = CheckpointStore(run_dir, keep=5)
    (folder,) = store.folder.glob(f"step-{step:08d}-*")
    ref = described(folder)
    assert isinstance(ref, CheckpointRef), ref
    state, adapter, optimizer = store.load(ref)
    return state, {**adapter, **{f"{k}/{name}": t for name, of in optimizer.items() for k, t in of.items()}}


@pytest.mark.parametrize("profile", ["ddp", "zero2", "zero3", "fsdp"])
def test_what_is_written_is_the_step_that_was_saved(profile: str, tiny_llama_dir: Path, folder: Path) -> None:
    """And not what the steps during the write have made of it: the reference was saved while training stood still."""
    still = launch(config(tiny_llama_dir, folder, f"{profile}-still", steps=2), folder, profile=profile, ranks=2)
    assert still.status == 0, still.output
    name = f"{profile}-going-on"
    run = launch(config(tiny_llama_dir, folder, name, steps=4), folder, profile=profile, ranks=2, more_env=slow_disk())
    assert run.status == 0, run.output
    assert run.losses()[:2] == still.losses()

    state, tensors = checkpoint(run.run_dir, 2)
    wanted_state, wanted = checkpoint(still.run_dir, 2)
    assert (state.step, state.epoch, state.consumed) == (wanted_state.step, wanted_state.epoch, wanted_state.consumed)
    assert tensors.keys() == wanted.keys()
    for tensor in wanted:
        assert torch.equal(tensors[tensor], wanted[tensor]), tensor
    _, later = checkpoint(run.run_dir, 4)
    assert any(not torch.equal(later[tensor], wanted[tensor]) for tensor in wanted)

    first, last = run.events("save")
    assert (first["step"], last["step"]) == (2, 4)
    assert min(first["seconds"], last["seconds"]) >= DISK_S
    assert first["blocked_s"] < DISK_S / 2  # nobody waited for the disk
    assert last["blocked_s"] > 1.25 * DISK_S  # for the rest of the write before it, and for its own: the run ends here
    made_meanwhile = [e["step"] for e in run.events("step") if first["time"] - DISK_S < e["time"] < first["time"]]
    assert {3, 4} <= set(made_meanwhile)
    (note,) = [event["message"] for event in run.events("note") if " waited " in event["message"]]
    assert note.startswith("the save after step 4 waited ")
    assert "until that of step 2 was written" in note


def test_a_death_while_a_save_is_written_goes_back_to_the_one_before(tiny_llama_dir: Path, folder: Path) -> None:
    """Rank 0 takes the writer along. No sample is lost or repeated in the committed lineage."""
    whole = launch(config(tiny_llama_dir, folder, "whole", steps=7), folder, profile="ddp", ranks=2)
    assert whole.status == 0, whole.output
    run = launch(
        config(tiny_llama_dir, folder, "killed", steps=7),
        folder,
        profile="ddp",
        ranks=2,
        inject=("rank=0,step=5,phase=forward,kind=sigkill",),
        more_env=slow_disk(),
    )
    assert run.status == 0, run.output
    (death,) = run.events("respawn")
    assert (death["resumed_step"], death["abandoned_steps"]) == (2, [3, 4])
    assert run.committed() == whole.committed()
    assert run.losses()[-5:] == pytest.approx(whole.losses()[2:], rel=1e-4)
    assert [(event["generation"], event["step"]) for event in run.events("save")] == [(0, 2), (1, 4), (1, 6), (1, 7)]
    assert not list((run.run_dir / "checkpoints").glob("*.unfinished"))


def test_a_rank_that_loses_its_peer_lets_the_save_under_way_end(tiny_llama_dir: Path, folder: Path) -> None:
    run = launch(
        config(tiny_llama_dir, folder, "peer-killed", steps=6),
        folder,
        profile="ddp",
        ranks=2,
        inject=("rank=1,step=5,phase=forward,kind=sigkill",),
        more_env=slow_disk(),
    )
    assert run.status == 0, run.output
    (death,) = run.events("respawn")
    assert (death["failed_rank"], death["resumed_step"], death["abandoned_steps"]) == (1, 4, [])
    assert sorted(run.committed()) == [1, 2, 3, 4, 5, 6]


def test_a_restart_that_all_ranks_agree_on_waits_for_the_save_under_way(tiny_llama_dir: Path, folder: Path) -> None:
    run = launch(
        config(tiny_llama_dir, folder, "agreed", steps=6),
        folder,
        profile="single",
        ranks=1,
        inject=("rank=0,step=5,phase=reduce,kind=oom",),
        more_env=slow_disk(),
    )
    assert run.status == 0, run.output
    (death,) = run.events("respawn")
    assert (death["failure"], death["resumed_step"], death["abandoned_steps"]) == ("cuda_oom", 4, [])
    assert [event["step"] for event in run.events("save")] == [2, 4, 6]


def test_a_stop_waits_for_the_save_under_way(tiny_llama_dir: Path, folder: Path) -> None:
    run = launch(
        config(tiny_llama_dir, folder, "diverged", steps=6),
        folder,
        profile="ddp",
        ranks=2,
        inject=("rank=1,step=5,phase=forward,kind=nan",),
        more_env=slow_disk(),
    )
    assert run.status == 4, run.output
    assert [event["step"] for event in run.events("save")] == [2, 4]
    newest = CheckpointStore(run.run_dir, keep=5).latest()
    assert newest is not None
    assert (newest.step, newest.notes) == (4, ())


def test_a_job_killed_while_it_writes_resumes_from_the_checkpoint_before(tiny_llama_dir: Path, folder: Path) -> None:
    """Launcher and ranks at once; nothing is left to clear up but by the next launch."""
    chosen = config(tiny_llama_dir, folder, "all-killed", steps=8, output__save_steps=3)
    argv, run_dir = command(chosen, folder, profile="ddp", ranks=2)
    log = folder / "all-killed.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(argv, env=environment(**slow_disk()), stdout=out, stderr=out, cwd=folder) as job,
    ):
        try:
            until = time.monotonic() + 120
            steps: list[int] = []
            while 7 not in steps:  # the checkpoint of step 3 counts, that of step 6 is handed over
                assert job.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.01)
                if (run_dir / "events" / "rank0.jsonl").exists():
                    seen = Finished(run_dir=run_dir, status=0, output="")
                    steps = [event["step"] for event in seen.events("step")]
        finally:
            everyone = psutil.Process(job.pid)
            everyone.suspend()
            for process in (everyone, *everyone.children(recursive=True)):
                process.send_signal(signal.SIGKILL)
    newest = CheckpointStore(run_dir, keep=5).latest()
    assert newest is not None
    assert newest.step == 3

    again = launch(chosen, folder, profile="ddp", ranks=2)
    assert again.status == 0, again.output
    assert [event["step"] for event in again.events("resume")] == [3]
    assert [event["step"] for event in again.events("step") if event["launch"] == 2] == [4, 5, 6, 7, 8]
    by_step: dict[int, set[tuple[int, ...]]] = {}
    for event in again.events("step"):
        by_step.setdefault(event["step"], set()).add(tuple(event["sample_ids"]))
    assert all(len(samples) == 1 for samples in by_step.values())  # abandoned steps took the same ones
    assert not list((run_dir / "checkpoints").glob("*.unfinished"))
