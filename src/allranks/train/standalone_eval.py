"""Evaluation by itself: the base model and base + adapter of a run on one set, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from allranks.batches.split import Cost
from allranks.checkpoints.adapter_files import ADAPTER_FILE, check_tensors, peft_key, tied_names
from allranks.checkpoints.final import ADAPTER_DIR
from allranks.checkpoints.store import CheckpointStore
from allranks.config.paths import expanded
from allranks.config.schema import RunConfig
from allranks.coordinator.failure import classify
from allranks.data.prepare import DataRequest, PreparedData, prepare
from allranks.errors import ExitCode, ProblemsError, StopTraining, UserError
from allranks.plan.plan import Plan
from allranks.train.answers import ShortAnswer, short_answer, special_ids
from allranks.train.model import load_model, load_tokenizer, model_max_length
from allranks.train.process import Rank, join
from allranks.train.quiet import quiet
from allranks.train.scoring import Bench, Score
from allranks.train.setup import first_caps

Words = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """What is to be evaluated.

    Attributes:
        run_dir: the run directory.
        plan: in it.
        finished: the run's last launch came to its end, so that ``adapter/`` is its adapter.
        step: last committed step.
        data: another set than the run's own evaluation set, of the same format and columns.
        split: of that set, where it has splits.
        max_samples: only the first so many samples.
        max_answer_tokens: longest answer that is compared word for word; 0: none is.
    """

    run_dir: Path
    plan: Plan
    finished: bool
    step: int
    data: str | None = None
    split: str | None = None
    max_samples: int | None = None
    max_answer_tokens: int = 32


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Both models on the same samples.

    Attributes:
        source: the set, as it was named.
        adapter_dir: folder of the adapter, within the run directory.
        step: of the adapter.
        device: ``cuda`` or ``cpu``.
        precision: ``bf16``, ``fp16`` or ``no``.
        samples: each counted once.
        targets: target tokens; for sequence-classification as many as samples.
        answers: samples with a short answer; None where the format has none.
        base: without the adapter.
        adapter: with it.
        seconds: for all of it, loading included.
    """

    source: str
    adapter_dir: str
    step: int
    device: str
    precision: str
    samples: int
    targets: int
    answers: int | None
    base: Score
    adapter: Score
    seconds: float


def side_by_side(request: EvalRequest, *, say: Words, progress: Words) -> SideBySide:
    """Evaluate the base model and base + adapter.

    Args:
        say: told what a person should know besides the figures, a line at a time.
        progress: told how far it is, often.

    Raises:
        UserError: there is no adapter yet or no evaluation set, or the set is not what the plan says.
        StopTraining: not even one sample fits into memory, or a library failed.
    """
    began = time.monotonic()
    quiet()
    trained = _trained_adapter(request, say)
    config = _config_of(trained.plan, request)
    rank, _ = join("single", _precision(trained.plan, say), patience_s=None)
    tokenizer, _ = load_tokenizer(config)
    data = _prepared(config, tokenizer, request, progress)
    chosen = data.eval
    assert chosen is not None
    for word in _words(data):
        say(word)
    model = _loaded(config, rank, tokenizer, data, trained.tensors)
    count = min(len(chosen), request.max_samples or len(chosen))
    if count < len(chosen):
        say(f"the first {count:,} of {len(chosen):,} samples, as --max-samples says")
    classes = config.model.task == "sequence-classification"
    if classes:
        say("the base has a head that was never trained: its figures are those of guessing")
    bench = Bench(
        model=model,
        rank=rank,
        tokenizer=tokenizer,
        data=chosen,
        count=count,
        answers=_answers(data, count, tokenizer, request.max_answer_tokens, config.data.completion_only_loss, say),
        classes=classes,
        caps=first_caps(config).evaluation.caps,
        cost=Cost(a=1.0, b=1.0 / (6 * model.config.hidden_size)),
        progress=progress,
    )
    with model.disable_adapter():
        base = bench.score("base")
    adapter = bench.score("adapter")
    assert data.report.eval is not None
    return SideBySide(
        source=data.report.eval.source,
        adapter_dir=trained.folder,
        step=trained.step,
        device=rank.device.type,
        precision=rank.precision,
        samples=count,
        targets=int(chosen.n_targets[:count].sum()),
        answers=None if bench.answers is None else len(bench.answers),
        base=base,
        adapter=adapter,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """An adapter on the disk, read; and the plan that it was trained by."""

    plan: Plan
    folder: str
    step: int
    tensors: Mapping[str, torch.Tensor]


def _trained_adapter(request: EvalRequest, say: Words) -> _Trained:
    from safetensors.torch import load

    plan, step, path = request.plan, request.step, request.run_dir / ADAPTER_DIR
    if not request.finished or not path.is_dir():
        store = CheckpointStore(request.run_dir, plan.config.output.save_total_limit)
        ref = store.latest()
        if ref is None:
            raise UserError(
                f"{request.run_dir}: there is no adapter yet: the run has neither finished nor saved a checkpoint\n"
                "    fix: let it come to its first checkpoint (output.save_steps)"
            )
        for note in ref.notes:
            say(note)
        why = "adapter/ is gone" if request.finished else "the run has not finished"
        say(f"{why}: the checkpoint of step {ref.step} is evaluated")
        # A later launch that was refused may have left another plan in the run directory.
        plan, step, path = store.saved_plan(ref), ref.step, store.path(ref)
    file = path / ADAPTER_FILE
    try:
        tensors = load(file.read_bytes())
    except Exception as error:  # missing, not readable, or cut short: safetensors has an exception of its own
        raise UserError(f"{file} can't be read: {error}\n    fix: bring the file back, or run again") from error
    return _Trained(plan=plan, folder=str(path.relative_to(request.run_dir)), step=step, tensors=tensors)


def _config_of(plan: Plan, request: EvalRequest) -> RunConfig:
    """The run's configuration with the set that is asked for; nothing is recomputed, for nothing is trained."""
    config = plan.config
    name = request.data or config.data.eval
    if name is None:
        raise UserError(
            f"{request.run_dir}: the run has no evaluation set (data.eval), and --data names none\n"
            f"    fix: allranks eval {request.run_dir} --data FILE"
        )
    if request.split is not None and expanded(name).is_file():
        raise UserError(
            f"--split {request.split}: {name} is a file, which has no splits\n"
            "    fix: leave --split out, or name a hub id or a folder saved by `datasets` with --data"
        )
    return config.model_copy(
        update={
            "data": config.data.model_copy(
                update={"eval": name, "eval_split": request.split or config.data.eval_split}
            ),
            "training": config.training.model_copy(update={"gradient_checkpointing": False}),
        }
    )


def _precision(plan: Plan, say: Words) -> str:
    """What the run computed in, where this machine can."""
    trained = plan.mixed_precision
    if not torch.cuda.is_available():
        precision = trained if plan.device == "cpu" else "no"
    elif trained == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        precision = "fp16"
    else:
        precision = trained
    if precision != trained:
        say(f"computing in {'fp32' if precision == 'no' else precision}; the run computed in {trained}")
    return precision


def _prepared(config: RunConfig, tokenizer: Any, request: EvalRequest, progress: Words) -> PreparedData:
    """The tokenised sets; the training set among them, because it decides max_length, format and classes."""
    wanted = DataRequest(
        data=config.data,
        task=config.model.task,
        model_max_length=model_max_length(config),
        num_labels=config.model.num_labels,
    )
    try:
        return prepare(
            wanted, tokenizer, progress=lambda done, total: progress(f"tokenising {done:,} of {total:,} samples")
        )
    except ProblemsError as error:
        given = {"data.eval": "--data" if request.data else "data.eval", "data.eval_split": "--split"}
        problems = [replace(problem, path=given.get(problem.path, problem.path)) for problem in error.problems]
        raise ProblemsError(error.source, problems) from error


def _words(data: PreparedData) -> tuple[str, ...]:
    """What is to be said of the evaluation set alone: the rest was said when the run began."""
    report = data.report
    assert report.eval is not None
    return replace(report, train=report.eval, eval=None, notes=(), label_names=()).lines()


def _loaded(
    config: RunConfig, rank: Rank, tokenizer: Any, data: PreparedData, tensors: Mapping[str, torch.Tensor]
) -> Any:
    """The PEFT model in evaluation mode, with the trained adapter in it."""
    torch.manual_seed(config.training.seed)  # a classifier's base gets a head of chance: the same at every call
    try:
        model = load_model(
            config,
            tokenizer=tokenizer,
            profile="single",  # decides how the packed bytes are stored, not what they are
            precision=rank.precision,
            device=rank.device,
            num_labels=config.model.num_labels or len(data.report.label_names) or None,
        ).model
    except Exception as error:
        if not classify(error).memory:
            raise
        raise StopTraining("out_of_memory", f"the model does not fit: {error}", ExitCode.OUT_OF_MEMORY) from error
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    again = {peft_key(name) for name in tied_names(model)}  # of tied modules the file has the tensor twice
    names = {peft_key(name): name for name in named}
    found = {names.get(key, key): tensor for key, tensor in tensors.items() if key not in again}
    check_tensors({name: tuple(parameter.shape) for name, parameter in named.items()}, found)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(found[name])
    return model.eval()


def _answers(
    data: PreparedData, count: int, tokenizer: Any, most_tokens: int, marked: bool, say: Words
) -> tuple[ShortAnswer, ...] | None:
    """The samples whose answer is short enough to be compared; None where the format has no answers."""
    if data.report.format not in ("prompt-completion", "chat") or most_tokens == 0:
        return None
    if not marked:
        say("no exact match: with data.completion_only_loss: false nothing tells where an answer begins")
        return None
    samples, special = data.eval, special_ids(tokenizer)
    assert samples is not None
    # What fills max_length may have lost its end.
    whole = (i for i in range(count) if samples.lengths[i] < data.report.max_length)
    found = (short_answer(samples[i], special, most_tokens) for i in whole)
    return tuple(answer for answer in found if answer is not None)
