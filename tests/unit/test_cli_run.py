"""`allranks run` and `allranks drill` as a user calls them, with a fake `accelerate` in place of the real one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.caps import Caps
from allranks.checkpoints.state import TrainState
from allranks.checkpoints.store import CheckpointStore
from allranks.config.load import load_run_config
from allranks.errors import ExitCode, ProblemsError, UserError
from allranks.launch.destination import destination
from allranks.plan.plan import PLAN_FILE, Plan
from allranks.plan.planner import run_directory
from allranks.rundir import launch_lock

REPOSITORY = Path(__file__).resolve().parents[2]

FAKE_ACCELERATE = """
import json, os, pathlib, sys
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
log = run_dir / "logs" / f"launch-{int(os.environ['ALLRANKS_LAUNCH']):04d}" / "rank0.log"
log.write_text("hello from a rank\\n")
reason, code = os.environ.get("FAKE_VERDICT", "finished,0").split(",")
if reason == "none":
    log.write_text("Traceback (most recent call last):\\nValueError: boom\\n")
    print("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.")
    sys.exit(1)
verdict = {"verdict_version": 1, "reason": reason, "message": "as told", "exit_code": int(code), "step": 3}
(run_dir / "verdict.json").write_text(json.dumps(verdict))
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with run.yaml."""
    package = tmp_path / "modules" / "accelerate" / "commands"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "launch.py").write_text(FAKE_ACCELERATE)
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "run.yaml").write_text("model: {name_or_path: org/model}\ndata: {train: train.jsonl}\n")
    return tmp_path


@pytest.fixture
def allranks(folder: Path) -> Command:
    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from allranks.cli.app import main; main()", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "modules"), "CUDA_VISIBLE_DEVICES": "", **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def plan_in(folder: Path, run: str) -> Plan:
    return Plan.read(folder / "runs" / run)


# --- run -------------------------------------------------------------------------------------------------------------


def test_a_run_from_its_plan_to_its_last_line(allranks: Command, folder: Path) -> None:
    done = allranks("run", "run.yaml", "--profile", "zero2", "--gpus", "3", OMP_NUM_THREADS="2")
    assert done.returncode == ExitCode.OK
    lines = done.stdout.splitlines()
    assert lines[0] == "allranks: run · launch 1 · zero2 on 3 cpu ranks · global batch 12"
    assert "allranks: OMP_NUM_THREADS=2 kept as set; a CPU rank has 1 by default" in lines
    assert lines[-3:] == [
        "allranks: logs in runs/run/logs/launch-0001",
        "[rank 0] hello from a rank",
        "allranks: finished; all about it: allranks show runs/run",
    ]
    assert done.stderr == ""
    plan = plan_in(folder, "run")
    assert (plan.profile_kind, plan.world_size, plan.resume) == ("zero2", 3, "auto")
    said = [line.removeprefix("allranks: ") for line in lines[1:-3]]
    assert list(plan.notes) == said


def test_launches_of_one_run_are_numbered(allranks: Command) -> None:
    for number in (1, 2):
        done = allranks("run", "run.yaml", "--profile", "ddp")
        assert f"allranks: run · launch {number} · ddp on 2 cpu ranks" in done.stdout


STILLBORN = "before all had joined, so none was started again"


@pytest.mark.parametrize(
    ("verdict", "code", "last_lines"),
    [
        ("out_of_memory,3", 3, ["allranks: exit code 3: out_of_memory at step 3: as told"]),
        ("interrupted,75", 75, ["allranks: exit code 75: interrupted at step 3: as told"]),
        (
            "none,1",
            1,
            [
                "allranks: the last lines of runs/run/logs/launch-0001/rank0.log:",
                "    Traceback (most recent call last):",
                "    ValueError: boom",
                f"allranks: exit code 1: rank 0 failed with exit status 1; {STILLBORN}",
            ],
        ),
    ],
)
def test_what_went_wrong_stands_last_on_stderr(
    verdict: str, code: int, last_lines: list[str], allranks: Command
) -> None:
    done = allranks("run", "run.yaml", "--profile", "single", FAKE_VERDICT=verdict)
    assert done.returncode == code
    assert done.stderr.splitlines() == last_lines


def test_a_smoke_run_is_always_fresh_and_never_touches_the_real_one(allranks: Command, folder: Path) -> None:
    for _ in range(2):
        assert allranks("run", "run.yaml", "--profile", "ddp", "--smoke", "--name", "big").returncode == 0
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["big-smoke", "big-smoke-2"]
    assert plan_in(folder, "big-smoke-2").smoke
    assert plan_in(folder, "big-smoke-2").resume == "never"


def test_a_run_that_must_not_resume_leaves_the_earlier_one_alone(allranks: Command, folder: Path) -> None:
    allranks("run", "run.yaml", "--profile", "ddp")
    before = (folder / "runs" / "run" / PLAN_FILE).read_bytes()
    done = allranks("run", "run.yaml", "--profile", "ddp", "--resume", "never")
    assert "allranks: run exists and is left alone: this run is run-2" in done.stdout
    assert (folder / "runs" / "run" / PLAN_FILE).read_bytes() == before
    assert plan_in(folder, "run-2").name == "run-2"


def test_a_dry_run_writes_nothing(allranks: Command, folder: Path) -> None:
    done = allranks("run", "run.yaml", "--profile", "zero3", "--dry-run")
    assert done.returncode == 0
    assert not (folder / "runs").exists()
    assert done.stdout.startswith("# zero3 on 2 cpu ranks, global batch 8\n# no GPU is visible")
    plan = done.stdout.partition("<<'PLAN'\n")[2].partition("\nPLAN\n")[0]
    assert json.loads(plan)["run_dir"] == str(folder / "runs" / "run")
    assert done.stdout.endswith(f"-m allranks.train \\\n    --run-dir {folder}/runs/run\n")


def test_a_run_directory_in_use_is_refused(allranks: Command, folder: Path) -> None:
    with launch_lock(folder / "runs" / "run"):
        done = allranks("run", "run.yaml", "--profile", "ddp")
    assert done.returncode == ExitCode.USAGE
    assert f"in use by a live launch (pid {os.getpid()} on " in done.stderr
    assert not (folder / "runs" / "run" / PLAN_FILE).exists()


def test_a_run_directory_that_cannot_be_made_is_refused(allranks: Command) -> None:
    done = allranks("run", "run.yaml", "--profile", "ddp", "--set", "output.dir=/proc/runs")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == (
        "the run directory /proc/runs/run can't be written: No such file or directory\n"
        "    fix: give another output.dir\n"
    )


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("logs", Path.touch, "/runs/run/logs is a file, and a run needs a folder there"),
        ("events", Path.touch, "/runs/run/events is a file, and a run needs a folder there"),
        ("checkpoints", Path.touch, "/runs/run/checkpoints is a file, and a run needs a folder there"),
        ("stop.request", Path.mkdir, "/runs/run/stop.request can't be written: Is a directory"),
        ("plan.json", Path.mkdir, "/runs/run/plan.json can't be written: Is a directory"),
    ],
)
def test_a_run_directory_with_something_else_in_it_is_refused(
    name: str, make: Callable[[Path], None], message: str, allranks: Command, folder: Path
) -> None:
    (folder / "runs" / "run").mkdir(parents=True)
    make(folder / "runs" / "run" / name)
    done = allranks("run", "run.yaml", "--profile", "ddp")
    assert done.returncode == ExitCode.USAGE
    assert f"{message}\n    fix: give another output.dir" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--resume", "must"), "--resume must: there is no checkpoint to go on from"),
        (("--resume", "must", "--smoke"), "--resume must contradicts --smoke, which always starts anew"),
        (("--resume", "maybe"), "'maybe' is none of: auto, must, never\n"),
        (("--gpus", "two"), "'two' is not a number of ranks; give a whole number from 1, or leave it out\n"),
        (("--gpus", "٢"), "'٢' is not a number of ranks"),
        (("--profile", "run.yaml"), "run.yaml: 1 problem\n  --profile: is the configuration of a run, not a profile\n"),
        (("--name", "a/b"), "output.name: 'a/b' is not the name of a run (--name)"),
        (("--gpus", "0"), "--gpus: 0 is not a number of ranks"),
        (("--set", "training.learning_rat=1"), "nearest: training.learning_rate"),
        (("--set", "output.dir=run.yaml"), "run.yaml/run can't be made or used: Not a directory"),
        (("--set", "output.dir=run.yaml", "--resume", "never"), "run can't be made or used: Not a directory"),
        (("--set", 'output.dir="a\\0b"'), "a\\x00b/run' can't be made or used: embedded null byte"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    words: tuple[str, ...], message: str, allranks: Command, folder: Path
) -> None:
    done = allranks("run", "run.yaml", "--profile", "ddp", *words)
    assert done.returncode == ExitCode.USAGE
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


def test_the_shell_wrapper_runs_the_environment_of_the_checkout(tmp_path: Path) -> None:
    fake = tmp_path / "venv" / "bin" / "allranks"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 75\n')
    fake.chmod(0o755)
    link = tmp_path / "allranks-run"
    link.symlink_to(REPOSITORY / "launch" / "allranks-run")
    for wrapper in (REPOSITORY / "launch" / "allranks-run", link):
        done = subprocess.run(
            [str(wrapper), "run.yaml", "--name", "two words"],
            env={"PATH": os.defpath, "ALLRANKS_VENV": str(tmp_path / "venv")},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout) == (75, "run|run.yaml|--name|two words|")
    missing = subprocess.run(
        [str(link)],
        env={"PATH": os.defpath, "ALLRANKS_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert missing.returncode == ExitCode.USAGE
    assert "fix: launch/setup.sh" in missing.stderr


# --- drill -----------------------------------------------------------------------------------------------------------


def test_a_drill_runs_in_a_directory_of_its_own_and_tells_what_happened(allranks: Command, folder: Path) -> None:
    done = allranks(
        *("drill", "run.yaml", "--profile", "ddp"),
        *("--inject", "rank=1,step=3,phase=backward,kind=oom,times=2"),
        *("--inject", "kind=nan,rank=0,step=1,phase=forward"),
        FAKE_VERDICT="not_finite,4",
    )
    assert done.returncode == ExitCode.DIVERGED
    assert done.stderr.splitlines() == [
        "allranks: exit code 4: not_finite at step 3: as told",
        "drill: oom × 2 on rank 1 in backward of step 3: did not happen; the run ended: not finite at step 3",
        "drill: nan on rank 0 in forward of step 1: did not happen; the run ended: not finite at step 3",
    ]
    plan = plan_in(folder, "run-drill")
    assert [(fault.rank, fault.kind, fault.times) for fault in plan.injections] == [(1, "oom", 2), (0, "nan", 1)]
    assert plan.resume == "never"


def test_all_faults_of_all_faults_are_listed_at_once(allranks: Command, folder: Path) -> None:
    done = allranks(
        *("drill", "run.yaml", "--profile", "ddp"),
        *("--inject", "rank=-1,step=0,phase=backwards,kind=oom,times=none"),
        *("--inject", "rank=1,rank=2,fase=step"),
        *("--inject", "rank=1,step=1"),
        *("--inject", "rank=1,step=٣,phase=step,kind=oom"),
    )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines() == [
        "--inject: 8 problems",
        "  rank=-1,step=0,phase=backwards,kind=oom,times=none: rank is '-1'",
        "      fix: give a whole number from 0",
        "  rank=-1,step=0,phase=backwards,kind=oom,times=none: step is '0'",
        "      fix: give a whole number from 1",
        "  rank=-1,step=0,phase=backwards,kind=oom,times=none: phase is 'backwards'",
        "      nearest: backward",
        "      valid: load, forward, backward, vote, reduce, step, eval, save, final",
        "  rank=-1,step=0,phase=backwards,kind=oom,times=none: times is 'none'",
        "      fix: give a whole number from 1",
        "  rank=1,rank=2,fase=step: rank is given twice",
        "      fix: keep one of them",
        "  rank=1,rank=2,fase=step: unknown key 'fase'",
        "      nearest: phase",
        "      valid: rank, step, phase, kind, times",
        "  rank=1,step=1: phase, kind missing",
        "      fix: write all of them, as in rank=1,step=3,phase=backward,kind=oom",
        "  rank=1,step=٣,phase=step,kind=oom: step is '٣'",
        "      fix: give a whole number from 1",
    ]
    assert not (folder / "runs").exists()


def test_the_name_of_the_file_obeys_the_rule_of_names(allranks: Command, folder: Path) -> None:
    (folder / "run.yaml").rename(folder / "-my run.yaml")
    done = allranks("run", "--profile", "ddp", "--", "-my run.yaml")
    assert done.returncode == ExitCode.USAGE
    assert "the name of the file, '-my run', is not the name of a run\n" in done.stderr
    assert "give --name my-run, or rename the file" in done.stderr
    assert not (folder / "runs").exists()
    assert allranks("run", "--profile", "ddp", "--name", "my-run", "--", "-my run.yaml").returncode == 0
    assert (folder / "runs" / "my-run" / PLAN_FILE).exists()


def test_the_last_line_can_be_pasted_into_a_shell(allranks: Command, folder: Path) -> None:
    done = allranks("run", "run.yaml", "--profile", "ddp", "--set", "output.dir=it's mine")
    *_, last = done.stdout.splitlines()
    _, _, command = last.partition("all about it: ")
    assert shlex.split(command) == ["allranks", "show", "it's mine/run"]


# --- where a launch goes ---------------------------------------------------------------------------------------------


def checkpointed(folder: Path, *settings: str) -> Path:
    """A run directory with a real checkpoint of the configuration with `settings`."""
    import torch

    config = load_run_config(folder / "run.yaml", settings)
    run_dir = folder / "runs" / "run"
    plan = Plan(
        name="run",
        run_dir=str(run_dir),
        config=config,
        profile_kind="ddp",
        profile_file="/profiles/ddp.yaml",
        profile={},
        world_size=2,
        device="cpu",
        mixed_precision="no",
        global_batch_size=8,
    )
    run_dir.mkdir(parents=True)
    (run_dir / PLAN_FILE).write_text(plan.to_json())
    state = TrainState(
        step=5,
        epoch=0,
        consumed=40,
        global_batch_size=8,
        fingerprint="f",
        seed=42,
        window=1,
        caps=Caps(max_samples=4, max_tokens=None),
        eval_caps=Caps(max_samples=2, max_tokens=None),
        checkpointing=True,
        skipped=(),
        cost=(1.0, 0.0),
        scaler=None,
        optimizer="adamw_torch_fused",
        world_size=2,
        profile_kind="ddp",
        versions={},
        wall_s=1.0,
    )
    store = CheckpointStore(run_dir, keep=2)
    name = "base_model.model.q_proj.lora_A.default.weight"
    moments = {"exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2), "step": torch.tensor(5.0)}
    store.publish(store.write(state, {name: torch.zeros(2, 2)}, {name: moments}, None))
    return run_dir


def test_a_run_goes_on_with_its_global_batch(folder: Path) -> None:
    run_dir = checkpointed(folder)
    goal = destination(run_dir, load_run_config(folder / "run.yaml", ["output.save_steps=7"]), "auto")
    assert (goal.run_dir, goal.recorded_global_batch, goal.notes) == (run_dir, 8, ())


def test_a_checkpoint_of_another_configuration_is_refused_key_by_key(allranks: Command, folder: Path) -> None:
    run_dir = checkpointed(folder)
    done = allranks("run", "run.yaml", "--profile", "zero2", "--set", "lora.r=8", "--set", "training.seed=1")
    assert done.returncode == ExitCode.USAGE
    assert f"{run_dir} holds a run of another configuration, at step 5: 3 problems" in done.stderr
    for key in ("lora.r", "lora.lora_alpha", "training.seed"):
        assert f"\n  {key}: " in done.stderr
    assert "--resume never" in done.stderr
    assert Plan.read(run_dir).config.lora.r == 16


def test_without_a_checkpoint_there_is_nothing_to_contradict(allranks: Command, folder: Path) -> None:
    allranks("run", "run.yaml", "--profile", "ddp")
    assert allranks("run", "run.yaml", "--profile", "ddp", "--set", "lora.r=8").returncode == 0
    assert plan_in(folder, "run").config.lora.r == 8


def test_never_takes_the_first_free_name(folder: Path) -> None:
    config = load_run_config(folder / "run.yaml")
    wanted = checkpointed(folder)
    for name in ("run-2", "run-4"):
        (wanted.parent / name).mkdir()
        (wanted.parent / name / PLAN_FILE).touch()
    goal = destination(wanted, config, "never")
    assert (goal.run_dir.name, goal.recorded_global_batch) == ("run-3", None)
    assert destination(wanted.with_name("new"), config, "never").notes == ()


@pytest.mark.parametrize(("name", "word"), [("run.yaml", "it is not a folder"), ("n" * 300, "File name too long")])
def test_what_can_be_no_run_directory_is_refused(name: str, word: str, folder: Path) -> None:
    config = load_run_config(folder / "run.yaml")
    for resume in ("auto", "never"):
        with pytest.raises(UserError, match=f"{name} can't be made or used: {word}"):
            destination(folder / name, config, resume)


def test_the_home_of_an_unknown_user_is_an_ordinary_folder(folder: Path) -> None:
    config = load_run_config(folder / "run.yaml", ["output.dir=~nobody-of-that-name/runs"])
    assert run_directory(config, folder / "run.yaml") == Path("~nobody-of-that-name/runs/run").absolute()


def test_must_needs_a_checkpoint(folder: Path) -> None:
    config = load_run_config(folder / "run.yaml")
    with pytest.raises(ProblemsError, match="there is no checkpoint to go on from"):
        destination(folder / "runs" / "run", config, "must")
    run_dir = checkpointed(folder)
    assert destination(run_dir, config, "must").recorded_global_batch == 8


@pytest.mark.parametrize("resume", ["auto", "must"])
@pytest.mark.parametrize("pointer", ["there", "missing"])
def test_damaged_checkpoints_are_no_reason_to_start_anew(
    allranks: Command, folder: Path, resume: str, pointer: str
) -> None:
    run_dir = checkpointed(folder)
    [checkpoint] = (run_dir / "checkpoints").glob("step-*")
    with (checkpoint / "optimizer.safetensors").open("ab") as file:
        file.write(b"garbage")
    if pointer == "missing":
        (run_dir / "checkpoints" / "latest.json").unlink()
    done = allranks("run", "run.yaml", "--profile", "ddp", "--resume", resume)
    assert done.returncode == ExitCode.STORAGE, done.stderr
    assert f"no usable checkpoint in {run_dir / 'checkpoints'}" in done.stderr
    assert f"checkpoint {checkpoint.name} is damaged: optimizer.safetensors has " in done.stderr
    assert "--resume never" in done.stderr
    assert checkpoint.is_dir() and not (run_dir / "logs").exists()

    anew = allranks("run", "run.yaml", "--profile", "ddp", "--resume", "never")
    assert anew.returncode == 0, anew.stderr
    assert (folder / "runs" / "run-2" / PLAN_FILE).exists() and checkpoint.is_dir()


@pytest.mark.parametrize(
    "words", [("run",), ("drill", "--matrix"), ("drill", "--inject", "rank=0,step=1,phase=load,kind=oom")]
)
def test_a_profile_that_is_not_given_is_told_with_the_valid_ones(allranks: Command, words: tuple[str, ...]) -> None:
    done = allranks(words[0], "run.yaml", *words[1:])
    assert done.returncode == ExitCode.USAGE
    assert "--profile: not given\n      valid: ddp, fsdp, single, zero2, zero3\n      fix: add --profile" in done.stderr
