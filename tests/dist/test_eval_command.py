"""`allranks eval` after a real run on two ranks: the run's own figures again, from the files that it left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import Finished, config_of, environment, launch

SHORT, LONG = "red", "red " * 12
"""Answers of 3 and of 47 tokens of `tiny_tokenizer`."""


def write(path: Path, completions: list[str]) -> None:
    rows = [json.dumps({"prompt": f"{number}:", "completion": text}) for number, text in enumerate(completions)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that learns to answer `SHORT` to everything."""
    folder = tmp_path_factory.mktemp("eval")
    write(folder / "train.jsonl", [SHORT] * 60)
    write(folder / "eval.jsonl", [SHORT, LONG, LONG, SHORT, LONG, SHORT, LONG, SHORT, LONG, LONG, SHORT])
    config = config_of(
        tiny_llama_dir,
        folder,
        data__eval=str(folder / "eval.jsonl"),
        training__max_steps=20,
        training__learning_rate=1e-2,
        training__eval_on_start=True,
    )
    done = launch(config, folder, profile="ddp", ranks=2)
    assert done.status == 0, done.output
    return done


def evaluated(run: Finished, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("allranks")), "eval", run.run_dir.name, *words],
        env=environment(),
        cwd=run.run_dir.parents[1],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def figures(run: Finished, *words: str) -> dict[str, Any]:
    return json.loads(evaluated(run, *words, "--json").stdout)


@pytest.mark.timeout(300)
def test_the_runs_own_loss_again(run: Finished) -> None:
    before = sorted(path for path in run.run_dir.rglob("*"))
    untrained, own = run.events("eval")
    found = figures(run)
    assert found["base"]["loss"] == pytest.approx(untrained["loss"], abs=1e-4)
    assert found["adapter"]["loss"] == pytest.approx(own["loss"], abs=1e-4)
    assert (found["samples"], found["targets"]) == (own["samples"], own["target_tokens"]) == (11, 5 * 4 + 6 * 49)
    assert untrained["loss"] > own["loss"] + 0.1
    assert found["difference"]["loss"] == found["adapter"]["loss"] - found["base"]["loss"]
    assert (found["answers"], found["base"]["exact_match"], found["adapter"]["exact_match"]) == (5, 0.0, 1.0)
    assert (found["step"], found["adapter_dir"], found["finished"]) == (20, "adapter", True)
    assert sorted(path for path in run.run_dir.rglob("*")) == before  # an evaluation leaves the run as it is


@pytest.mark.timeout(300)
def test_another_set_on_the_screen(run: Finished) -> None:
    write(run.run_dir.parents[1] / "other.jsonl", [SHORT, "blue", LONG])
    done = evaluated(run, "--data", "other.jsonl", "--max-samples", "2")
    lines = done.stdout.splitlines()
    assert lines[0] == "ddp: 2 samples of other.jsonl, 9 target tokens"
    assert lines[3].split() == ["BASE", "ADAPTER", "DIFFERENCE"]
    assert lines[5].split() == ["exact", "match", "0.0%", "50.0%", "+50.0", "points"]
    assert max(map(len, lines)) <= 80
    assert done.stderr.splitlines()[-1] == "allranks: the first 2 of 3 samples, as --max-samples says"


@pytest.mark.timeout(300)
def test_a_run_that_has_not_finished(run: Finished) -> None:
    died = replace(run, run_dir=run.run_dir.with_name("died"))
    shutil.copytree(run.run_dir, died.run_dir)
    shutil.rmtree(died.run_dir / "adapter")
    (died.run_dir / "verdict.json").unlink()
    done = evaluated(died, "--json", "--max-answer-tokens", "0")
    found = json.loads(done.stdout)
    assert "allranks: the run has not finished: the checkpoint of step 20 is evaluated" in done.stderr
    assert found["adapter_dir"].startswith("checkpoints/step-00000020-")
    assert found["adapter"]["loss"] == pytest.approx(run.events("eval")[-1]["loss"], abs=1e-4)
    assert (found["finished"], found["answers"], found["adapter"]["exact_match"]) == (False, None, None)


@pytest.mark.timeout(300)
def test_a_classifier_has_an_accuracy(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name, texts in (("train", 30), ("eval", 7)):
        rows = [
            {"text": ("sun song", "rain grey")[n % 2] * (n % 3 + 1), "label": ("glad", "sad")[n % 2]}
            for n in range(texts)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    config = config_of(
        tiny_llama_dir,
        tmp_path,
        model__task="sequence-classification",
        data__eval=str(tmp_path / "eval.jsonl"),
        training__max_steps=6,
        training__learning_rate=1e-2,
    )
    run = launch(config, tmp_path, profile="single", ranks=1)
    assert run.status == 0, run.output
    found = figures(run)
    assert found["adapter"]["loss"] == pytest.approx(run.events("eval")[-1]["loss"], abs=1e-4)
    assert found["adapter"]["accuracy"] == 1.0
    assert 0.0 <= found["base"]["accuracy"] < 1.0
    assert (found["samples"], found["answers"], found["adapter"]["exact_match"]) == (7, None, None)
