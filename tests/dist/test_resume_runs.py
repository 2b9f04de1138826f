"""Stop, then go on with other ranks and another profile: the same samples per step, the same losses."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from runs import Finished, command, config_of, environment, launch, launch_bare

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(config_of(tiny_llama_dir, folder, output__name="whole"), folder, profile="ddp", ranks=2)
    assert run.status == 0, run.output
    return run


@pytest.fixture(scope="module")
def stopped(tiny_llama_dir: Path, folder: Path) -> Path:
    """A run directory whose newest checkpoint is that of step 7: a rank was killed in step 8."""
    config = config_of(tiny_llama_dir, folder, output__name="stopped", output__save_steps=7, oom__max_respawns=0)
    run = launch(config, folder, profile="ddp", ranks=2, inject=("rank=1,step=8,phase=forward,kind=sigkill",))
    assert run.status == 5, run.output
    assert max(run.committed()) == 7
    return run.run_dir


@pytest.mark.parametrize(("profile", "ranks"), [("single", 1), ("ddp", 3), ("ddp", 4), ("zero2", 2), ("fsdp", 2)])
def test_resume_elsewhere(
    profile: str, ranks: int, stopped: Path, uninterrupted: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    name = f"resumed-{profile}-{ranks}"
    shutil.copytree(stopped, folder / "runs" / name)
    config = config_of(
        tiny_llama_dir, folder, output__name=name, output__save_steps=7, training__per_device_train_batch_size=2
    )
    run = launch(config, folder, profile=profile, ranks=ranks, more=("--resume", "must"))
    assert run.status == 0, run.output
    assert run.committed() == uninterrupted.committed()
    losses = [event["loss"] for event in run.events("step") if event["launch"] == 2]
    assert losses == pytest.approx(uninterrupted.losses()[7:], rel=1e-4)
    resumed = run.events("resume")[0]
    assert (resumed["step"], resumed["epoch"], resumed["consumed"]) == (7, 0, 56)


def test_another_run_does_not_resume(stopped: Path, tiny_llama_dir: Path, folder: Path) -> None:
    name = "other"
    shutil.copytree(stopped, folder / "runs" / name)
    config = config_of(tiny_llama_dir, folder, output__name=name, training__learning_rate=1e-3, lora__r=8)
    run = launch(config, folder, profile="ddp", ranks=2)
    assert run.status == 2, run.output
    assert "training.learning_rate" in run.output
    assert "lora.r" in run.output


@pytest.mark.parametrize("file", ["optimizer.safetensors", "state.json"])
def test_ranks_that_find_only_damaged_checkpoints_start_and_remove_nothing(
    file: str, stopped: Path, tiny_llama_dir: Path, folder: Path
) -> None:
    """Without our launcher, which would have refused before."""
    run_dir = shutil.copytree(stopped, folder / "runs" / f"damaged-{file}")
    (run_dir / "checkpoints" / "latest.json").unlink()
    [checkpoint] = (run_dir / "checkpoints").glob("step-*")
    with (checkpoint / file).open("ab") as damaged:
        damaged.write(b"garbage")
    before = sorted(path.name for path in checkpoint.iterdir())
    steps = (run_dir / "events" / "rank0.jsonl").read_text().count('"kind": "step"')
    config = config_of(tiny_llama_dir, folder, output__name=run_dir.name)
    run = launch_bare(config, folder, profile="single", ranks=1, observe={})
    assert run.status != 0
    assert (run.verdict["reason"], run.verdict["exit_code"]) == ("storage", 6)
    assert f"checkpoint {checkpoint.name} is damaged: {file} " in run.verdict["message"]
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    assert len(run.events("step")) == steps


def test_the_command_of_a_finished_run_leaves_its_card_as_it_is(tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(
        tiny_llama_dir, folder, output__name="again", training__max_steps=3, training__eval_on_start=True
    )
    config["data"]["eval"] = str(folder / "eval.jsonl")
    first = launch(config, folder, profile="single", ranks=1)
    assert first.status == 0, first.output
    card_file = first.run_dir / "adapter" / "README.md"
    card = card_file.read_text()
    for row in ("training loss, last step", "evaluation loss, base model", "evaluation loss, this adapter"):
        assert re.search(rf"^\| {row} \| \d\.\d{{4}} \|$", card, re.MULTILINE), card

    again = launch(config, folder, profile="single", ranks=1)
    assert again.status == 0, again.output
    assert "the run was finished already: adapter/ stays as it is" in again.output
    assert card_file.read_text() == card

    card_file.unlink()
    rewritten = launch(config, folder, profile="single", ranks=1)
    assert rewritten.status == 0, rewritten.output
    assert re.sub(r"\| training time .*", "", card_file.read_text()) == re.sub(r"\| training time .*", "", card)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_saves_at_the_step_boundary(number: signal.Signals, tiny_llama_dir: Path, folder: Path) -> None:
    config = config_of(
        tiny_llama_dir, folder, output__name=f"asked-{number.name}", training__max_steps=5000, output__save_steps=1000
    )
    argv, run_dir = command(config, folder, profile="ddp", ranks=2)
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder) as run:
        events = run_dir / "events" / "rank0.jsonl"
        try:
            until = time.monotonic() + 90
            while not (events.exists() and '"kind": "step"' in events.read_text()) and time.monotonic() < until:
                time.sleep(0.2)
            run.send_signal(number)
            output, _ = run.communicate(timeout=60)
        finally:
            run.kill()  # the ranks leave when their launcher is gone
    assert run.returncode == 75, output.decode()
    finished = Finished(run_dir=run_dir, status=run.returncode, output=output.decode())
    assert finished.verdict["reason"] == "interrupted"
    assert finished.events("save")[-1]["step"] == finished.verdict["step"] == max(finished.committed())
