"""`allranks runs` and `allranks show`, over run directories written as a run writes them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoints.durable import FileRecord
from allranks.checkpoints.published import pointer_content, published
from allranks.checkpoints.state import CheckpointRef
from allranks.cli.app import main
from allranks.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from allranks.errors import ExitCode, UserError
from allranks.events import EventLog
from allranks.plan.plan import PLAN_FILE, Injection, Plan
from allranks.report.drill import drill_report
from allranks.report.runs import find_runs, read_run
from allranks.report.screens import run_screen, runs_table, table
from allranks.rundir import injected_dir, launch_lock, launch_log_dir
from allranks.verdict import VERDICT_FILE, Reason, Verdict, write_verdict

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB.\nsecond line"


class Run:
    """A run directory under construction."""

    def __init__(self, folder: Path, name: str = "demo", **fields: Any) -> None:
        self.dir = folder / name
        self.plan = replace(
            Plan(
                name=name,
                run_dir=str(self.dir),
                config=RunConfig(
                    model=ModelConfig(name_or_path="smol"),
                    data=DataConfig(train="train.jsonl"),
                    training=TrainingConfig(num_train_epochs=2),
                ),
                profile_kind="zero2",
                profile_file="/profiles/zero2.yaml",
                profile={},
                world_size=2,
                device="cpu",
                mixed_precision="no",
                global_batch_size=8,
                notes=("2 ranks on 2 CPUs",),
            ),
            **fields,
        )
        self.dir.mkdir(parents=True)
        (self.dir / PLAN_FILE).write_text(self.plan.to_json())
        self.logs: list[EventLog] = []

    def launch(self, number: int = 1) -> Run:
        launch_log_dir(self.dir, number).mkdir(parents=True)
        self.logs = [EventLog(self.dir, rank, number) for rank in range(2)]
        return self

    def data(self, samples: int = 90) -> Run:
        self.logs[0].write("data", samples=samples, eval_samples=5, max_length=64, truncated=3, skipped=1)
        return self

    def steps(self, *numbers: int, loss: float = 2.0) -> Run:
        for step in numbers:
            common = {"step": step, "loss": loss, "grad_norm": 0.5}
            self.logs[0].write(
                "step",
                **common,
                epoch=0,
                sample_ids=[step],
                skipped_samples=[],
                micro_batches=[],
                target_tokens=9,
                seconds=1.0,
                caps=[4, None],
            )
            memory = {"peak_bytes": [1 << 30, 3 << 29], "reserved_bytes": [1 << 31, 1 << 31]}
            self.logs[0].write("log", **common, learning_rate=2e-4, tokens_per_s=1234.0, **memory)
        return self

    def failure(self, step: int, *, rank: int = 1, phase: str = "backward", attempt: int = 0) -> Run:
        self.logs[rank].write(
            "failure",
            step=step,
            phase=phase,
            failure="cuda_oom",
            message=OOM,
            attempt=attempt,
            sample_ids=[],
            tokens=0,
            bytes_asked=2 << 30,
            bytes_free=512 << 20,
        )
        return self

    def retry(self, step: int, caps: list[int | None], *, skipped: tuple[int, ...] = ()) -> Run:
        self.logs[0].write(
            "retry",
            step=step,
            attempt=1,
            phase="train",
            failed_rank=1,
            message="all ranks retry",
            caps=caps,
            gradient_checkpointing=True,
            skipped_samples=list(skipped),
        )
        return self

    def save(self, step: int, *, there: bool = True, told: bool = True) -> Run:
        name = f"step-{step:08d}-00"
        if told:
            self.logs[0].write("save", step=step, path=name, seconds=0.5, blocked_s=0.1, bytes=1 << 20)
        if there:
            folder = self.dir / "checkpoints"
            (folder / name).mkdir(parents=True)
            files = {"adapter_model.safetensors": FileRecord(bytes=3 << 20, sha256="")}
            older = list(published(folder, own=()).refs)
            ref = CheckpointRef(step=step, folder=name, files=files)
            (folder / "latest.json").write_bytes(pointer_content(ref, older, []))
        return self

    def respawn(self, step: int, *, phase: str, resumed: int) -> Run:
        self.logs[0].write(
            "respawn",
            step=step,
            phase=phase,
            failure="killed",
            failed_rank=1,
            message="rank 1 was killed by SIGKILL",
            caps=[4, None],
            gradient_checkpointing=False,
            skipped_samples=[],
            resumed_step=resumed,
            abandoned_steps=[],
            used=1,
            max_respawns=3,
        )
        return self

    def fired(self, number: int, times: int = 1) -> Run:
        folder = injected_dir(self.dir, 1)
        folder.mkdir(parents=True, exist_ok=True)
        for nth in range(1, times + 1):
            (folder / f"{number}-{nth}").touch()
        return self

    def resume(self, step: int) -> Run:
        self.logs[0].write("resume", step=step, epoch=0, consumed=step * 8, checkpoint=f"step-{step:08d}-00")
        return self

    def verdict(self, reason: Reason, code: ExitCode, step: int, message: str = "done") -> Run:
        write_verdict(self.dir, Verdict(reason=reason, message=message, exit_code=code, step=step))
        return self

    def at(self, seconds: float) -> Run:
        """Pretend that the last sign of life was then."""
        for path in self.dir.rglob("*"):
            os.utime(path, (seconds, seconds))
        return self


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["allranks", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    return int(leaving.value.code or 0)


DAMAGED = [
    b"\xff\xfe\x00",
    b"null",
    b"3",
    b"{}",
    b'{"kind": "step"}',
    b'{"v": 1, "time": 1.0, "rank": 0, "launch": 1, "kind": "log", "step": 4}',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_event_is_left_out(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path).launch().data().steps(1)
    with (run.dir / "events" / "rank0.jsonl").open("ab") as file:
        file.write(line + b"\n")
    run.steps(2)
    assert read_run(run.dir).step == 2
    assert command(monkeypatch, "show", str(run.dir)) == ExitCode.OK


@pytest.mark.parametrize("name", ["plan.json", "verdict.json", "events/rank0.jsonl", "events/rank1.jsonl"])
def test_one_run_that_cannot_be_read_hides_no_other(name: str, tmp_path: Path) -> None:
    Run(tmp_path, "good").launch()
    bad = Run(tmp_path, "bad").launch()
    (bad.dir / name).unlink(missing_ok=True)
    (bad.dir / name).mkdir()
    reports, unreadable = find_runs(tmp_path)
    assert [report.plan.name for report in reports] == ["good"]
    assert [line.partition(" can't")[0] for line in unreadable] == [f"{bad.dir}: {bad.dir / name}"]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_steps_and_losses_of_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().data(samples=90).steps(1, 2, 3, loss=1.5)
    report = read_run(run.dir)
    assert (report.step, report.total_steps, report.loss) == (3, 24, 1.5)  # two epochs of ceil(90 / 8) steps
    assert report.eval_loss is None


@pytest.mark.parametrize(("smoke", "max_steps", "total"), [(True, None, 3), (False, 7, 7), (True, 2, 2)])
def test_the_total_follows_the_plan(smoke: bool, max_steps: int | None, total: int, tmp_path: Path) -> None:
    run = Run(tmp_path, smoke=smoke)
    training = run.plan.config.training.model_copy(update={"max_steps": max_steps})
    plan = replace(run.plan, config=run.plan.config.model_copy(update={"training": training}))
    (run.dir / PLAN_FILE).write_text(plan.to_json())
    assert read_run(run.launch().data().dir).total_steps == total


def test_states(tmp_path: Path) -> None:
    planned = Run(tmp_path, "planned")
    died = Run(tmp_path, "died").launch()
    ended = Run(tmp_path, "ended").launch().verdict("not_finite", ExitCode.DIVERGED, 4)
    assert [read_run(run.dir).state for run in (planned, died, ended)] == ["planned", "died", "not_finite"]
    with launch_lock(ended.dir):
        assert read_run(ended.dir).state == "running"


def test_only_the_committed_lineage_counts(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().data().steps(1, 2, 3, 4, loss=3.0).save(2)
    run.launch(2).resume(2).steps(3, loss=2.0)
    report = read_run(run.dir)
    assert [(log["step"], log["loss"]) for log in report.logs] == [(1, 3.0), (2, 3.0), (3, 2.0)]
    assert (report.step, report.launches) == (3, 2)


def test_a_run_that_starts_anew_gives_up_all_earlier_steps(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().data().steps(1, 2, 3)
    run.launch(2).steps(1)
    assert [log["step"] for log in read_run(run.dir).logs] == [1]


def test_failures_of_every_rank_stand_beside_what_all_ranks_did(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().steps(1, 2).failure(3).retry(3, [2, None]).steps(3)
    assert [(e["kind"], e["rank"]) for e in read_run(run.dir).incidents] == [("failure", 1), ("retry", 0)]


def test_checkpoints_that_were_pruned_are_not_listed(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().save(1, there=False).save(2)
    assert [save["step"] for save in read_run(run.dir).saves] == [2]


def test_a_checkpoint_whose_event_was_lost_with_the_ranks_is_listed(tmp_path: Path) -> None:
    report = read_run(Run(tmp_path).launch().save(1).save(2, told=False).dir)
    assert [(save["step"], save["bytes"], save["seconds"]) for save in report.saves] == [
        (1, 1 << 20, 0.5),
        (2, 3 << 20, None),
    ]
    assert "  step 2  step-00000002-00  3 MiB" in run_screen(report, 80)


def test_notes_of_the_plan_and_of_the_latest_launch(tmp_path: Path) -> None:
    run = Run(tmp_path).launch()
    run.logs[0].write("note", message="an older one")
    run.launch(2)
    for message in ("2 ranks on 2 CPUs", "3 samples were cut"):
        run.logs[0].write("note", message=message)
    assert read_run(run.dir).notes == ("2 ranks on 2 CPUs", "3 samples were cut")


def test_runs_are_listed_latest_first_and_unreadable_ones_named(tmp_path: Path) -> None:
    for name, when in (("old", 100.0), ("new", 300.0), ("middle", 200.0)):
        Run(tmp_path, name).at(when)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / PLAN_FILE).write_text('{"plan_version": 0}')
    (tmp_path / "no-run").mkdir()
    reports, unreadable = find_runs(tmp_path)
    assert [report.plan.name for report in reports] == ["new", "middle", "old"]
    (line,) = unreadable
    assert line.startswith(f"{tmp_path}/foreign: can't be read by this version of allranks: plan version 0 is not 1")


def test_a_broken_verdict_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path).launch()
    (run.dir / VERDICT_FILE).write_text("{")
    with pytest.raises(UserError, match=r"verdict\.json"):
        read_run(run.dir)


# --- screens ---------------------------------------------------------------------------------------------------------


def full_run(folder: Path) -> Run:
    run = Run(folder).launch().data()
    run.logs[0].write(
        "model",
        parameters=137_000_000,
        trainable=2_440_000,
        base_bytes=120_000_000,
        attention="varlen_attn",
        padding_free=True,
        loss="torch",
    )
    run.steps(1, 2).failure(3).retry(3, [2, 128]).steps(3)
    run.logs[0].write("skipped_step", step=4, reason="fp16 overflow")
    run.logs[0].write("eval", step=3, loss=1.9, samples=5, target_tokens=50, seconds=1.5)
    run.save(3).verdict("storage", ExitCode.STORAGE, 3, "the checkpoint was not written\n    fix: make room")
    return run.at(1_000_000_000.0)


def test_the_screen_of_one_run(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    report = replace(read_run(run.dir), run_dir=Path("runs/demo"), updated=1_000_000_000.0)
    assert "\n".join(run_screen(report, 80)) == (
        """\
demo
  state   stopped: a checkpoint could not be written or read, 2001-09-09 01:46
  folder  runs/demo
  profile zero2 on 2 cpu ranks · fp32 · global batch 8 · 1 launch
  model   smol · 2.44 of 137.0 million parameters trained · base 114 MiB ·
          attention varlen_attn, no padding · loss by torch
  data    train.jsonl · 90 samples, 5 for evaluation · at most 64 tokens, 3
          truncated · 1 skipped
  steps   3/24

notes
  2 ranks on 2 CPUs

training
  STEP    LOSS  GRAD NORM        LR  TOKENS/S  PEAK PER RANK
     1  2.0000        0.5  2.00e-04     1,234        1.5 GiB
     2  2.0000        0.5  2.00e-04     1,234        1.5 GiB
     3  2.0000        0.5  2.00e-04     1,234        1.5 GiB

evaluation
  STEP    LOSS  SAMPLES   TIME
     3  1.9000        5  1.5 s

incidents
  step 3: rank 1 failed in backward (cuda_oom): CUDA out of memory. Tried to
    allocate 2.00 GiB.
  step 3: all ranks took it again with at most 2 samples and 128 tokens per
    micro-batch
  step 4: no update: fp16 overflow

checkpoints
  step 3  step-00000003-00  1 MiB, written in 0.5 s

verdict
  storage at step 3 (exit code 6): the checkpoint was not written
      fix: make room"""
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen(width: int, tmp_path: Path) -> None:
    run = full_run(tmp_path / "runs")
    report = replace(read_run(run.dir), run_dir=Path("runs/demo"), notes=("word " * 60,))
    assert max(map(len, run_screen(report, width))) <= width
    long_name = replace(report, plan=replace(report.plan, name="n" * 200))
    assert max(map(len, runs_table([report, long_name], max(width, 80)))) <= max(width, 80)


def test_a_sample_left_out_and_caps_that_grew_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path, "grown").launch().data().steps(1, 2).retry(2, [1, 128], skipped=(7, 9))
    run.logs[0].write("caps", step=2, reason="headroom", message="…", caps=[2, 256])
    text = "\n".join(run_screen(read_run(run.dir), 300))
    again = "step 2: all ranks took it again with at most 1 sample and 128 tokens per micro-batch"
    assert f"{again}, without 2 samples that did not fit (7, 9)" in text
    assert "step 2: from here on at most 2 samples and 256 tokens per micro-batch (every GPU had room)" in text


def test_a_long_history_is_thinned_and_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path).launch().steps(*range(1, 101))
    lines = run_screen(read_run(run.dir), 80)
    start = lines.index("training (12 of 100 rows)")
    steps = [int(line.split()[0]) for line in lines[start + 2 : start + 14]]
    assert (steps[0], steps[-1], len(set(steps))) == (1, 100, 12)


def test_the_table_of_runs(tmp_path: Path) -> None:
    Run(tmp_path, "first").launch().data().steps(1, 2).verdict("finished", ExitCode.OK, 2).at(0)
    Run(tmp_path, "second", profile_kind="single", world_size=1).at(0)
    reports = [replace(report, updated=0.0) for report in find_runs(tmp_path)[0]]
    assert runs_table(sorted(reports, key=lambda report: report.plan.name), 80) == [
        "NAME    PROFILE  RANKS  STEPS    LOSS  STATE     WHEN",
        "first   zero2        2   2/24  2.0000  finished  1970-01-01 00:00",
        "second  single       1    0/?       -  planned   1970-01-01 00:00",
    ]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([("a", "b"), ("long", "10")], right=(1,)) == ["a      b", "long  10"]


# --- commands --------------------------------------------------------------------------------------------------------


def test_runs_prints_data_on_stdout_and_the_rest_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, "a" * 120)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / PLAN_FILE).write_text("{}")
    assert command(monkeypatch, "runs", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].startswith("a" * 120 + "  zero2")
    assert "foreign" not in printed.out
    assert "foreign: can't be read by this version of allranks" in printed.err


def test_json_of_runs_and_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = full_run(tmp_path)
    assert command(monkeypatch, "runs", str(tmp_path), "--json") == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["name"] == "demo"
    assert (line["step"], line["total_steps"], line["loss"], line["state"]) == (3, 24, 2.0, "storage")
    assert command(monkeypatch, "show", str(run.dir), "--json") == 0
    all_of_it = json.loads(capsys.readouterr().out)
    assert line.items() <= all_of_it.items()
    assert all_of_it["verdict"]["exit_code"] == 6
    assert all_of_it["config"]["model"]["name_or_path"] == "smol"
    assert [incident["kind"] for incident in all_of_it["incidents"]] == [
        "failure",
        "retry",
        "skipped_step",
    ]


def test_show_takes_a_name_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "show", "demo") == 0
    assert capsys.readouterr().out.startswith("demo\n  state   planned, never started, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("show", "nope"),
            r"nope: no such run, neither as a path nor in runs/\n    valid: demo\n    fix: give the path",
        ),
        (("show", "dem"), r"dem: no such run, neither .*\n    nearest: demo\n    valid: demo\n"),
        (("show", "d"), r"d: no such run, neither .*\n    nearest: demo\n    valid: demo\n"),
        (("show", ""), r"RUN is empty\n    fix: give the path of a run directory, or its name in runs/"),
        (("runs", "nope"), r"nope: no such folder\n    fix: give the folder that holds the runs"),
    ],
)
def test_what_is_not_there_is_said(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)


def test_an_empty_folder_has_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "runs", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"no runs in {tmp_path}\n")


# --- drills ----------------------------------------------------------------------------------------------------------


def fault(**fields: Any) -> Injection:
    return replace(Injection(rank=1, step=3, phase="backward", kind="oom"), **fields)


def test_a_drill_tells_what_became_of_each_fault(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        injections=(
            fault(),
            fault(step=4, phase="forward", times=2),
            fault(step=2, phase="eval"),
            fault(step=2, phase="reduce"),
            fault(step=5, kind="sigkill"),
            fault(step=7),
        ),
    ).launch()
    run.steps(1, 2).failure(3).retry(3, [2, None]).steps(3)
    run.failure(4, phase="forward").retry(4, [1, None]).failure(4, phase="forward", attempt=1).steps(4)
    run.fired(0).fired(1, times=2).fired(4)
    again = "all ranks took the step again with at most"
    died = "the run died without a verdict"
    assert [line.removeprefix("drill: ").replace(" on rank 1", "") for line in drill_report(run.plan)] == [
        f"oom in backward of step 3: happened once; {again} 2 samples per micro-batch, and committed it",
        f"oom × 2 in forward of step 4: happened 2 times; {again} 1 sample per micro-batch, and committed it",
        "oom in eval of step 2: did not happen: step 2 has no eval",
        "oom in reduce of step 2: did not happen, though the step was committed: a fault of allranks",
        f"sigkill in backward of step 5: happened once; {died}",
        f"oom in backward of step 7: did not happen; {died}",
    ]


def test_a_fault_that_ends_the_run_is_told_with_the_verdict(tmp_path: Path) -> None:
    run = (
        Run(tmp_path, injections=(fault(), fault(step=9, phase="forward"), fault(step=5, kind="sigkill")))
        .launch()
        .steps(1, 2)
    )
    run.fired(0)
    run.failure(3).verdict("out_of_memory", ExitCode.OUT_OF_MEMORY, 2)
    assert drill_report(run.plan) == [
        "drill: oom on rank 1 in backward of step 3: happened once; the run ended: out of memory at step 2",
        "drill: oom on rank 1 in forward of step 9: did not happen; the run ended: out of memory at step 2",
        "drill: sigkill on rank 1 in backward of step 5: did not happen; the run ended: out of memory at step 2",
    ]


def test_a_save_that_failed_is_not_passed_because_its_step_was_made(tmp_path: Path) -> None:
    faults = (fault(phase="save", kind="error", times=2), fault(phase="save", step=2), fault(phase="final", step=4))
    run = Run(tmp_path, injections=faults).launch().steps(1, 2).save(2).steps(3).retry(3, [4, None]).fired(0, times=2)
    run.fired(1).fired(2).verdict("failure", ExitCode.CRASH, 3)
    failed = "the run ended: failure at step 3"
    assert drill_report(run.plan) == [
        f"drill: error × 2 on rank 1 in save of step 3: happened 2 times; {failed}",
        f"drill: oom on rank 1 in save of step 2: happened once; {failed}",
        f"drill: oom on rank 1 in final of step 4: happened once; {failed}",
    ]


def test_a_drill_counts_the_death_after_which_the_ranks_gave_up(tmp_path: Path) -> None:
    faults = (fault(kind="sigkill", times=3), fault(step=1, phase="load", kind="exit"))
    run = Run(tmp_path, injections=faults).launch().respawn(0, phase="load", resumed=0).steps(1, 2)
    run.respawn(3, phase="backward", resumed=2).fired(0, times=2).fired(1).verdict("failure", ExitCode.RANK_LOST, 2)
    assert drill_report(run.plan) == [
        (
            "drill: sigkill × 3 on rank 1 in backward of step 3: happened 2 times; all ranks were started again once; "
            "the run ended: failure at step 2"
        ),
        (
            "drill: exit on rank 1 while loading: happened once; all ranks were started again, went on from step 0, "
            "and passed it"
        ),
    ]
