"""`allranks eval`: its screen, and what it says when there is nothing to evaluate."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.app import main
from allranks.cli.evaluate import _json, _screen
from allranks.config.schema import DataConfig, ModelConfig, RunConfig
from allranks.errors import ExitCode
from allranks.plan.plan import PLAN_FILE, Plan
from allranks.report.runs import read_run
from allranks.train.standalone_eval import Score, SideBySide
from allranks.verdict import Verdict, write_verdict


def make_run(folder: Path, name: str, *, finished: bool = True, **data: Any) -> Path:
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    plan = Plan(
        name=name,
        run_dir=str(run_dir),
        config=RunConfig(model=ModelConfig(name_or_path="m"), data=DataConfig(train="train.jsonl", **data)),
        profile_kind="zero2",
        profile_file="/profiles/zero2.yaml",
        profile={},
        world_size=2,
        device="cpu",
        mixed_precision="no",
        global_batch_size=8,
    )
    (run_dir / PLAN_FILE).write_text(plan.to_json(), encoding="utf-8")
    if finished:
        import torch
        from safetensors.torch import save_file

        write_verdict(run_dir, Verdict(reason="finished", message="done", exit_code=ExitCode.OK, step=7))
        (run_dir / "adapter").mkdir()
        save_file({"x": torch.zeros(1)}, run_dir / "adapter" / "adapter_model.safetensors")
    return run_dir


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["allranks", "eval", *words])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == ExitCode.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


Refuse = tuple[pytest.MonkeyPatch, pytest.CaptureFixture[str]]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    return monkeypatch, capsys


def test_no_such_run_names_those_there_are(folder: Path, shell: Refuse) -> None:
    make_run(folder, "first")
    make_run(folder, "second")
    assert refused(*shell, "third").splitlines() == [
        "third: no such run, neither as a path nor in runs/",
        "    valid: first, second",
        "    fix: give the path of its directory, or list the runs of a folder with `allranks runs DIR`",
    ]


def test_no_adapter_yet(folder: Path, shell: Refuse) -> None:
    make_run(folder, "young", finished=False)
    assert refused(*shell, "young").splitlines() == [
        "runs/young: there is no adapter yet: the run has neither finished nor saved a checkpoint",
        "    fix: let it come to its first checkpoint (output.save_steps)",
    ]


def test_an_adapter_that_is_damaged(folder: Path, shell: Refuse) -> None:
    file = make_run(folder, "broken", eval="eval.jsonl") / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    text = refused(*shell, "broken")
    assert text.startswith("runs/broken/adapter/adapter_model.safetensors can't be read: ")
    file.unlink()
    assert "No such file" in refused(*shell, "broken")


def test_no_evaluation_set(folder: Path, shell: Refuse) -> None:
    make_run(folder, "bare")
    assert refused(*shell, "bare").splitlines() == [
        "runs/bare: the run has no evaluation set (data.eval), and --data names none",
        "    fix: allranks eval runs/bare --data FILE",
    ]


def test_a_split_of_a_file(folder: Path, shell: Refuse) -> None:
    make_run(folder, "plain", eval="eval.jsonl")
    (folder / "eval.jsonl").touch()
    text = refused(*shell, "plain", "--split", "validation")
    assert text.splitlines()[0] == "--split validation: eval.jsonl is a file, which has no splits"


@pytest.fixture
def with_model(folder: Path, tiny_llama_dir: Path) -> Path:
    """A run whose model and training set are there."""
    run_dir = make_run(folder, "other")
    plan = (run_dir / PLAN_FILE).read_text(encoding="utf-8")
    (run_dir / PLAN_FILE).write_text(plan.replace('"name_or_path": "m"', f'"name_or_path": "{tiny_llama_dir}"'))
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    return run_dir


def test_faults_of_a_set_are_named_by_the_option(with_model: Path, shell: Refuse) -> None:
    text = refused(*shell, "other", "--data", "./trian.jsonl")
    assert "--data: there is no file or folder './trian.jsonl'" in text
    assert "nearest: train.jsonl" in text


def test_an_adapter_of_other_keys(with_model: Path, shell: Refuse) -> None:
    text = refused(*shell, "other", "--data", "train.jsonl")
    assert "the checkpoint's adapter does not fit the model" in text
    assert "extra: x [1]" in text
    assert "missing: base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight [16, 64]" in text


def test_screen(folder: Path) -> None:
    report = read_run(make_run(folder, "demo"))
    found = SideBySide(
        source="eval.jsonl",
        adapter_dir="adapter",
        step=7,
        device="cpu",
        precision="no",
        samples=50,
        targets=1234,
        answers=42,
        base=Score(loss=3.25, accuracy=None, exact_match=0.0),
        adapter=Score(loss=2.125, accuracy=None, exact_match=0.5),
        seconds=12.34,
    )
    lines = _screen(report, found, 32)
    assert lines == [
        "demo: 50 samples of eval.jsonl, 1,234 target tokens",
        "adapter of step 7 · cpu, fp32 · 12.3 s",
        "",
        "               BASE  ADAPTER    DIFFERENCE",
        "loss         3.2500   2.1250       -1.1250",
        "exact match    0.0%    50.0%  +50.0 points",
        "",
        "exact match: greedy answers to the 42 of 50 samples whose own answer has at most",
        "32 tokens",
    ]
    assert _json(report, found, 32)["precision"] == "fp32"
    assert _json(report, replace(found, precision="bf16"), 32)["precision"] == "bf16"
