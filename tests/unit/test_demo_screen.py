"""The demo around its run: its configuration, what it reads from the events, and when it admits failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allranks.caps import Caps
from allranks.config.load import load_run_config
from allranks.demo import __main__ as demo
from allranks.demo.__main__ import (
    FAULT_STEP,
    Shrink,
    agreed_shrinks,
    eval_losses,
    failed_phase,
    run_command,
    shortcomings,
)
from allranks.demo.instructions import generate, write_data
from allranks.events import EventLog

SHRINK = Shrink(step=FAULT_STEP, phase="step", failed_rank=1, caps=(2, 190))


def retry(run_dir: Path, rank: int, **changed: Any) -> None:
    fields = {"step": FAULT_STEP, "attempt": 1, "phase": "step", "failed_rank": 1, "caps": [2, 190], **changed}
    agreed = {"message": "all ranks retry", "gradient_checkpointing": True, "skipped_samples": []}
    EventLog(run_dir, rank, launch=1).write("retry", **fields, **agreed)


def written_config(folder: Path) -> Path:
    write_data(folder / "demo-data")
    file = folder / "demo.yaml"
    model = folder / "model: #1"
    model.mkdir()
    file.write_text(demo.run_yaml(file, model, folder / "demo-data", folder, 16), encoding="utf-8")
    return file


def test_its_configuration_is_valid_and_means_what_it_says(tmp_path: Path) -> None:
    config = load_run_config(written_config(tmp_path), ())
    assert config.model.name_or_path == str(tmp_path / "model: #1")
    assert config.data.train == str(tmp_path / "demo-data" / "train.jsonl")
    assert config.output.dir == str(tmp_path)
    assert (config.training.max_steps, config.training.global_batch_size) == (16, 8)
    assert config.training.eval_on_start


def test_ranks_that_wrote_the_same_shrank_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        retry(tmp_path, rank)
    assert agreed_shrinks(tmp_path, 2) == [SHRINK]


def test_ranks_that_wrote_otherwise_did_not(tmp_path: Path) -> None:
    retry(tmp_path, 0)
    assert agreed_shrinks(tmp_path, 2) == []
    retry(tmp_path, 1, caps=[1, 95])
    assert agreed_shrinks(tmp_path, 2) == []


def test_the_failing_rank_tells_where(tmp_path: Path) -> None:
    assert failed_phase(tmp_path, SHRINK) == "step"
    for step, phase in ((2, "forward"), (3, "backward")):
        EventLog(tmp_path, 1, 1).write(
            "failure",
            step=step,
            phase=phase,
            failure="host_oom",
            message="",
            attempt=0,
            sample_ids=[],
            tokens=0,
            bytes_asked=None,
            bytes_free=None,
        )
    assert failed_phase(tmp_path, SHRINK) == "backward"


def test_eval_losses_are_the_first_and_the_last(tmp_path: Path) -> None:
    assert eval_losses(tmp_path) is None
    for step, loss in ((0, 1.8), (10, 0.9), (20, 0.6)):
        EventLog(tmp_path, 0, 1).write("eval", step=step, loss=loss, samples=50, target_tokens=9, seconds=1.0)
    assert eval_losses(tmp_path) == (1.8, 0.6)


@pytest.mark.parametrize(
    ("shrinks", "losses", "said"),
    [
        ([SHRINK], (1.8, 0.6), []),
        ([], (1.8, 0.6), ["the ranks did not all write down that they shrank in step 3"]),
        ([Shrink(step=9, phase="step", failed_rank=1, caps=(2, 190))], (1.8, 0.6), ["did not all write"]),
        ([Shrink(step=3, phase="step", failed_rank=0, caps=(2, 190))], (1.8, 0.6), ["did not all write"]),
        ([SHRINK], (0.6, 1.8), ["the evaluation loss did not fall"]),
        ([SHRINK], (1.8, float("nan")), ["the evaluation loss did not fall"]),
        ([], None, ["did not all write", "the evaluation loss did not fall"]),
    ],
)
def test_it_admits_what_it_did_not_show(
    shrinks: list[Shrink], losses: tuple[float, float] | None, said: list[str]
) -> None:
    found = shortcomings(shrinks, losses)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_it_runs_the_real_command_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written_config(tmp_path)
    assert run_command(["config", "check", str(config)], tmp_path) == (tmp_path, 0)
    assert capsys.readouterr().out == f"{config}: valid\n"


def test_the_questions_shown_are_of_the_evaluation_set() -> None:
    train, evaluation = generate()
    shown = demo.shown_questions()
    assert len(shown) == 2
    assert all(question in evaluation and question not in train for question in shown)


def test_brackets_in_an_answer_are_shown_as_they_are() -> None:
    out = Console(width=100, record=True, file=(sys.stderr))
    demo.show_results(out, (1.8, 0.6), demo.shown_questions()[:1], ["[/] [red]x"], ["y"])
    shown = out.export_text()
    assert "[/] [red]x" in shown
    assert "1.800" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_data_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks.demo", "--data-only", "--workdir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "demo-data" / name) for name in ("train.jsonl", "eval.jsonl")]


@pytest.mark.slow
def test_the_failing_micro_batch_holds_several_samples(smollm2_dir: Path, tmp_path: Path) -> None:
    """Else there would be nothing to shrink: the seed in the configuration sees to it."""
    from allranks.batches.order import SampleOrder
    from allranks.batches.split import split
    from allranks.data.prepare import DataRequest, prepare
    from allranks.train.model import load_tokenizer

    write_data(tmp_path / "demo-data")
    file = tmp_path / "demo.yaml"
    file.write_text(demo.run_yaml(file, smollm2_dir, tmp_path / "demo-data", tmp_path, 16), encoding="utf-8")
    config = load_run_config(file, ())
    tokenizer, _ = load_tokenizer(config)
    data = prepare(DataRequest(data=config.data, task="causal-lm", model_max_length=None), tokenizer, progress=None)
    order = SampleOrder(
        n_samples=len(data.train),
        lengths=data.train.lengths,
        seed=config.training.seed,
        fingerprint=data.train.fingerprint,
        global_batch_size=8,
    )
    assert int(data.train.lengths.max()) < 1536
    lengths = data.train.lengths[list(order.batch(0, 8 * (FAULT_STEP - 1)))].tolist()
    caps = Caps(max_samples=4, max_tokens=config.training.max_tokens_per_micro_batch)
    ranks = split(lengths, world_size=2, caps=caps, lockstep=False)
    assert len(ranks[1][0]) == 4
