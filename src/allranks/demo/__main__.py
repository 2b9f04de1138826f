"""The demonstration: ``python -m allranks.demo``.

A real pretrained model in 4 bits is fine-tuned on two ranks; one of them loses memory in step 3, on purpose; all
ranks shrink their micro-batch together and go on; plain PEFT loads the adapter.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from allranks import environment
from allranks.cli.app import build_app
from allranks.data.cache import default_cache_dir
from allranks.demo.answers import load_base, replies, with_adapter
from allranks.demo.instructions import Instruction, generate, write_data
from allranks.demo.model import ensure_smollm2
from allranks.errors import AllranksError, ExitCode, UserError
from allranks.events import read_events
from allranks.plan.hardware import detect
from allranks.plan.plan import PLAN_FILE
from allranks.report.screens import caps_words
from allranks.units import human_seconds

FAULT_STEP = 3
SHOWN = (("fee", 0), ("label", 1))
"""Evaluation samples that are asked before and after: kind, and which of that kind."""

RUN_YAML = """\
# Written by `python -m allranks.demo`. What each key means: allranks config show --resolved {file}
model:
  name_or_path: {model}
quantization:
  load_in_4bit: true                # NF4 with double quantisation
lora:
  r: 8                              # lora_alpha is 2r; all seven projections
data:
  train: {data}/train.jsonl
  eval: {data}/eval.jsonl
  max_length: 1536                  # tokens; the longest sample fits
training:
  max_steps: {steps}
  global_batch_size: 8              # samples of a step over all ranks, whatever the memory
  per_device_train_batch_size: 4    # samples of a micro-batch, to begin with
  max_tokens_per_micro_batch: 512   # a longer sample travels alone
  per_device_eval_batch_size: 8
  learning_rate: 2.0e-3
  gradient_checkpointing: false     # there is memory enough
  eval_on_start: true
  seed: 607                         # an order whose third step has short samples, four to a micro-batch
output:
  dir: {runs}
  name: demo
"""


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """One decision of the ranks to retry with smaller micro-batches, as a rank wrote it down.

    Attributes:
        step: optimizer step that is tried again.
        phase: what was tried: ``step``, ``eval`` or ``save``.
        failed_rank: rank that ran out of memory.
        caps: most samples and most tokens of a micro-batch from now on.
    """

    step: int
    phase: str
    failed_rank: int
    caps: tuple[int, int | None]


def demo(
    profile: Annotated[str, typer.Option(help="How the model is spread over the ranks.")] = "zero2",
    ranks: Annotated[int, typer.Option(min=2, help="Ranks; without GPUs they share the CPU.")] = 2,
    steps: Annotated[int, typer.Option(min=FAULT_STEP, help="Optimizer steps.")] = 16,
    workdir: Annotated[Path, typer.Option(help="Folder for the configuration, the data and the run.")] = Path("runs"),
    data_only: Annotated[bool, typer.Option("--data-only", help="Write the data set and leave.")] = False,
) -> None:
    """Fine-tune SmolLM2-135M in 4 bits on two ranks, and lose memory on one of them on purpose."""
    began = time.monotonic()
    out = Console(width=min(100, Console().width), highlight=False)
    data_dir = workdir / "demo-data"
    if data_only:
        typer.echo("\n".join(map(str, write_data(data_dir))))
        return
    _quieten()
    out.rule("[bold]1 · Model and data", align="left")
    config_file = prepare(workdir, data_dir, steps, out)

    out.rule("[bold]2 · Before", align="left")
    questions = shown_questions()
    base, tokenizer = load_base(_model_dir(out), detect().device)
    before = replies(base, tokenizer, questions)
    for question, answer in zip(questions, before, strict=True):
        out.print(f"[dim]Q[/] {escape(question.question)}\n[dim]A[/] {escape(answer)}\n")

    fault = f"rank=1,step={FAULT_STEP},phase=backward,kind=alloc"
    command = ["drill", str(config_file), "--profile", profile, "--gpus", str(ranks), "--inject", fault]
    out.rule("[bold]3 · Fine-tuning, with a real allocation failure on rank 1", align="left")
    out.print(f"[dim]$[/] allranks {' '.join(command)}", soft_wrap=True)
    run_dir, status = run_command(command, workdir)
    if status != ExitCode.OK:
        raise typer.Exit(status)

    out.rule("[bold]4 · What happened", align="left")
    shrinks = agreed_shrinks(run_dir, ranks)
    losses = eval_losses(run_dir)
    for shrink in shrinks:
        out.print(
            f"Step {shrink.step}: rank {shrink.failed_rank} ran out of memory in {failed_phase(run_dir, shrink)}. "
            f"{'Both' if ranks == 2 else f'All {ranks}'} ranks dropped the attempt, agreed on "
            f"{caps_words(shrink.caps)} per micro-batch, and took the same 8 samples again."
        )
    adapter = run_dir / "adapter"
    after = replies(with_adapter(base, adapter), tokenizer, questions)
    show_results(out, losses, questions, before, after)
    out.print(f"Adapter, loaded above by PeftModel.from_pretrained: [bold]{adapter}[/]", soft_wrap=True)
    out.print(f"Took {human_seconds(time.monotonic() - began)}.")
    problems = shortcomings(shrinks, losses)
    for problem in problems:
        out.print(f"[bold red]The demo did not show what it should:[/] {problem}")
    raise typer.Exit(ExitCode.CRASH if problems else ExitCode.OK)


def prepare(workdir: Path, data_dir: Path, steps: int, out: Console) -> Path:
    """Make the model, the data and the configuration; return the path of the latter.

    Raises:
        UserError: the model's package is missing, or `workdir` can't be written.
    """
    model_dir = _model_dir(out)
    config_file = workdir / "demo.yaml"
    try:
        train, evaluation = write_data(data_dir)
        config_file.write_text(run_yaml(config_file, model_dir, data_dir, workdir, steps), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--workdir: {workdir} can't be written: {error.strerror}") from error
    for path, what in ((model_dir, "model"), (train, "data"), (evaluation, ""), (config_file, "run")):
        out.print(f"{what:6}{path}", soft_wrap=True)
    return config_file


def _model_dir(out: Console) -> Path:
    return ensure_smollm2(default_cache_dir(), say=out.print)


def run_yaml(config_file: Path, model_dir: Path, data_dir: Path, runs: Path, steps: int) -> str:
    """The text of the demo's configuration; paths to data are relative to `config_file`."""
    return RUN_YAML.format(
        file=config_file,
        model=json.dumps(str(model_dir)),
        data=data_dir.relative_to(config_file.parent).as_posix(),
        runs=json.dumps(str(runs)),
        steps=steps,
    )


def shown_questions() -> list[Instruction]:
    """The evaluation samples whose answers are shown."""
    _, evaluation = generate()
    return [[sample for sample in evaluation if sample.kind == kind][index] for kind, index in SHOWN]


def run_command(words: Sequence[str], runs: Path) -> tuple[Path, int]:
    """Run ``allranks`` with these words in this process.

    Returns:
        The run directory that it made below `runs`, and its exit code.
    """
    known = set(runs.glob(f"*/{PLAN_FILE}"))
    status: Any = build_app()(list(words), standalone_mode=False)
    made = set(runs.glob(f"*/{PLAN_FILE}")) - known
    return (made.pop().parent if made else runs), int(status or 0)


def agreed_shrinks(run_dir: Path, ranks: int) -> list[Shrink]:
    """What all ranks wrote down alike about retries; empty if any rank wrote something else."""
    written = [_shrinks(run_dir, rank) for rank in range(ranks)]
    return written[0] if all(each == written[0] for each in written) else []


def _shrinks(run_dir: Path, rank: int) -> list[Shrink]:
    return [
        Shrink(
            step=event["step"],
            phase=event["phase"],
            failed_rank=event["failed_rank"],
            caps=(event["caps"][0], event["caps"][1]),
        )
        for event in read_events(run_dir, rank)
        if event["kind"] == "retry"
    ]


def failed_phase(run_dir: Path, shrink: Shrink) -> str:
    """Where in its step the rank failed, e.g. ``backward``, as it wrote down itself."""
    events = read_events(run_dir, shrink.failed_rank)
    return next((e["phase"] for e in events if e["kind"] == "failure" and e["step"] == shrink.step), shrink.phase)


def eval_losses(run_dir: Path) -> tuple[float, float] | None:
    """The first and the last evaluation loss of the run; None if there are not two."""
    losses = [event["loss"] for event in read_events(run_dir) if event["kind"] == "eval"]
    return (losses[0], losses[-1]) if len(losses) > 1 else None


def shortcomings(shrinks: list[Shrink], losses: tuple[float, float] | None) -> list[str]:
    """What is missing from a demonstration that went as it should; one line each."""
    found = []
    if not [shrink for shrink in shrinks if shrink.step == FAULT_STEP and shrink.failed_rank == 1]:
        found.append(f"the ranks did not all write down that they shrank in step {FAULT_STEP}")
    if losses is None or not losses[1] < losses[0]:
        found.append("the evaluation loss did not fall")
    return found


def show_results(
    out: Console,
    losses: tuple[float, float] | None,
    questions: Sequence[Instruction],
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    """Before and after side by side."""
    table = Table(show_lines=True, expand=True)
    table.add_column("", ratio=3)
    table.add_column("before", ratio=4)
    table.add_column("after", ratio=4)
    if losses is not None:
        table.add_row("evaluation loss, 50 samples", *(f"[bold]{loss:.3f}[/]" for loss in losses))
    for question, first, second in zip(questions, before, after, strict=True):
        table.add_row(*map(escape, (question.question, first, second)))
    out.print(table)


def _quieten() -> None:
    # Libraries say while they load what does not matter here.
    environment.put("DS_ACCELERATOR", "cuda" if detect().gpus else "cpu")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)


def main() -> None:
    """Entry point; errors of the user become a message and an exit code."""
    try:
        typer.run(demo)
    except AllranksError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
