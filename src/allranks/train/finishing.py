"""The end of a run: the adapter folder, reloaded and compared before the run says success."""

from __future__ import annotations

import math
import time

import torch

from allranks.checkpoints.adapter_files import ADAPTER_FILE, peft_key
from allranks.checkpoints.final import ADAPTER_DIR, Outcome, already_written, model_card, write_adapter
from allranks.data.collate import pad_batch
from allranks.errors import ExitCode, StopTraining
from allranks.events import read_events
from allranks.lineage import committed
from allranks.strategies.base import NamedTensors
from allranks.train.context import Context
from allranks.train.job import Job
from allranks.train.together import Attempt, together
from allranks.train.versions import versions

_PROBE_TOKENS = 64


def finish(ctx: Context, job: Job) -> None:
    """Write ``adapter/`` and prove that it gives the logits of the model that was trained.

    Raises:
        StopTraining: it could not be written, or gives other logits.
    """
    step = job.position.step
    probe = _probe(ctx, job)
    lockstep = job.strategy.lockstep and ctx.world_size > 1
    gathers = job.strategy.gathers and ctx.world_size > 1
    expected, _ = together(ctx, "save", step, lambda _: _logits(job, probe), collective=lockstep)

    def gather(at: Attempt) -> NamedTensors:
        at.enter("final")
        ctx.injector.at("final", at.key.step)
        return job.strategy.trainable()

    def write(at: Attempt) -> None:
        at.enter("final")
        if not ctx.is_main:
            return
        if _trained_before(job) and already_written(ctx.run_dir, adapter, tied=job.tied):
            ctx.note(f"the run was finished already: {ADAPTER_DIR}/ stays as it is")
        else:
            write_adapter(
                ctx.run_dir,
                peft_config=job.peft_config,
                adapter=adapter,
                tokenizer=job.tokenizer,
                card=model_card(ctx.plan, _outcome(ctx, job)),
                tied=job.tied,
            )

    adapter, _ = together(ctx, "save", step, gather, collective=gathers)
    together(ctx, "save", step, write)
    together(ctx, "save", step, lambda _: _reload(ctx, job, adapter), collective=gathers)
    found, _ = together(ctx, "save", step, lambda _: _logits(job, probe), collective=lockstep)
    worst = float((found - expected).abs().max())
    if any(row[0] for row in ctx.control.exchange([float(not torch.equal(found, expected))])):
        raise StopTraining(
            "failure",
            f"the written adapter gives other logits than the trained model (by up to {worst:.3g} on this rank)\n"
            "    fix: the last checkpoint is usable; please report this",
            ExitCode.CRASH,
        )
    if ctx.is_main:
        ctx.events.write(
            "finish", step=step, seconds=job.earlier_s + time.monotonic() - ctx.started, adapter=ADAPTER_DIR
        )


def _probe(ctx: Context, job: Job) -> dict[str, torch.Tensor]:
    """The first training sample, cut short; the same on all ranks."""
    sample = job.data.train[0]
    batch = pad_batch([sample], job.tokenizer.pad_token_id)
    batch.pop("labels")
    return {name: tensor[:, :_PROBE_TOKENS].to(ctx.rank.device) for name, tensor in batch.items()}


def _logits(job: Job, probe: dict[str, torch.Tensor]) -> torch.Tensor:
    job.strategy.train_mode(False)
    with torch.no_grad():
        return job.strategy.forward(probe).detach().float().cpu()


def _reload(ctx: Context, job: Job, adapter: NamedTensors) -> None:
    """Wipe the trained parameters, then set them from the file alone."""
    from safetensors.torch import load_file

    saved = load_file(ctx.run_dir / ADAPTER_DIR / ADAPTER_FILE)
    job.strategy.load_trainable({name: torch.zeros_like(tensor) for name, tensor in adapter.items()})
    job.strategy.load_trainable({name: saved[peft_key(name)] for name in adapter})


def _trained_before(job: Job) -> bool:
    """This launch found all steps done."""
    return math.isnan(job.last_loss)


def _outcome(ctx: Context, job: Job) -> Outcome:
    """What there is to tell; what an earlier launch measured is in its events."""
    events = list(read_events(ctx.run_dir))
    steps = {event["step"]: float(event["loss"]) for event in committed(events, "step")}
    of_this_set = 0 if job.data.eval is None else len(job.data.eval)
    evaluations = {
        event["step"]: float(event["loss"]) for event in committed(events, "eval") if event["samples"] == of_this_set
    }
    step = job.position.step
    config = job.model.config
    resized = ctx.plan.config.model.resize_token_embeddings
    return Outcome(
        steps=step,
        train_samples=len(job.data.train),
        max_length=job.data.report.max_length,
        train_loss=steps.get(step) if _trained_before(job) else job.last_loss,
        eval_loss_before=evaluations.get(0) if job.eval_loss_before is None else job.eval_loss_before,
        eval_loss=evaluations.get(step) if job.last_eval_loss is None else job.last_eval_loss,
        wall_s=job.earlier_s + time.monotonic() - ctx.started,
        world_size=ctx.world_size,
        num_labels=config.num_labels if ctx.plan.config.model.task == "sequence-classification" else None,
        embedding_rows=job.model.get_input_embeddings().weight.shape[0] if resized else None,
        approximate=job.approximate,
        versions=versions(),
    )
