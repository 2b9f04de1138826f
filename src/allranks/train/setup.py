"""From a plan to a job: data, model, spread, resume. Every part is an attempt of all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from allranks.batches.fit import CostFit
from allranks.batches.order import SampleOrder
from allranks.batches.split import Cost
from allranks.caps import Caps
from allranks.checkpoints.adapter_files import tied_names
from allranks.checkpoints.resume import fingerprint_difference, resume_differences, resume_notes
from allranks.checkpoints.store import CheckpointRef, CheckpointStore, check_optimizer, check_tensors
from allranks.config.schema import RunConfig, recomputes_all
from allranks.coordinator.policy_state import PolicyState
from allranks.data.collate import Collate
from allranks.data.prepare import DataRequest, PreparedData, prepare
from allranks.errors import Problem, ProblemsError, UserError
from allranks.plan.plan import Plan
from allranks.strategies.base import Strategy
from allranks.strategies.optim import EIGHT_BIT, build_optimizer
from allranks.train.base_check import (
    packed_weights,
    require_equal_on_all_ranks,
    require_intact,
    weights_seen_in_forward,
)
from allranks.train.context import Context
from allranks.train.job import Job, Position
from allranks.train.model import ModelParts, load_model, load_tokenizer, model_max_length
from allranks.train.process import spread
from allranks.train.proofs import prove_loss, proven_attention
from allranks.train.respawning import Revival, tell
from allranks.train.scaler import LossScale
from allranks.train.schedule import total_steps
from allranks.train.together import Attempt, remember_caps, together


def first_caps(config: RunConfig) -> PolicyState:
    """The caps before anything has failed; evaluation has half of training's unless told otherwise."""
    training = config.training
    samples = training.per_device_train_batch_size
    eval_samples = training.per_device_eval_batch_size or max(1, samples // 2)
    return PolicyState.start(
        train=Caps(max_samples=samples, max_tokens=training.max_tokens_per_micro_batch),
        evaluation=Caps(max_samples=eval_samples, max_tokens=training.max_tokens_per_micro_batch),
        checkpointing=recomputes_all(training),
    )


def set_up(ctx: Context, revival: Revival | None) -> Job:
    """Load everything and resume if there is something to resume from.

    Args:
        revival: what ended the ranks before these, if they were started again.

    Raises:
        StopTraining: all ranks agreed to stop: a fault in what the user gave, or out of memory while loading.
    """
    config = ctx.plan.config
    store = CheckpointStore(ctx.run_dir, config.output.save_total_limit)
    ref = _checkpoint_to_resume(ctx, store)
    if revival is not None:
        tell(ctx, revival, 0 if ref is None else ref.step)
    tokenizer, data = _load_data(ctx)
    parts = _load_model(ctx, tokenizer, data)
    before = packed_weights(parts.model)
    shapes = {name: tuple(p.shape) for name, p in parts.model.named_parameters() if p.requires_grad}
    require_equal_on_all_ranks(ctx.control, parts.model)
    strategy = _spread(ctx, parts)
    ctx.lockstep = strategy.lockstep
    seen, _ = together(
        ctx,
        "load",
        0,
        lambda _: weights_seen_in_forward(strategy, parts.model, ctx.rank.device),
        collective=strategy.lockstep and ctx.world_size > 1,
    )
    require_intact(ctx.control, before, seen)
    attention = proven_attention(ctx, parts, strategy, tokenizer)
    prove_loss(ctx, parts, strategy, tokenizer)
    order = SampleOrder(
        n_samples=len(data.train),
        lengths=data.train.lengths,
        seed=config.training.seed,
        fingerprint=data.train.fingerprint,
        global_batch_size=ctx.plan.global_batch_size,
        window=config.training.group_by_length_window,
    )
    cost = Cost(a=1.0, b=1.0 / (6 * parts.model.config.hidden_size))
    job = Job(
        model=parts.model,
        strategy=strategy,
        peft_config=parts.model.peft_config["default"].to_dict(),
        shapes=shapes,
        tied=tied_names(parts.model),
        tokenizer=tokenizer,
        data=data,
        order=order,
        cost=cost,
        fit=CostFit(prior=cost),
        head=parts.head,
        collate=Collate(pad_token_id=tokenizer.pad_token_id, flat=attention.flat),
        total_steps=0,
        scale=LossScale(ctx.rank.precision),
        store=store,
        checkpointing=recomputes_all(config.training),
        position=Position(),
    )
    if ref is not None:
        _resume(ctx, job, ref)
    remember_caps(ctx)
    job.total_steps = total_steps(config.training, job.order.steps_per_epoch, smoke=ctx.plan.smoke)
    return job


def _checkpoint_to_resume(ctx: Context, store: CheckpointStore) -> CheckpointRef | None:
    """What rank 0 found, the same on all ranks, after its configuration was compared; None to start at step 0."""

    def look(_: Attempt) -> CheckpointRef | None:
        if not ctx.is_main:
            return None
        if ctx.plan.resume == "never" and ctx.generation == 0:
            aside = store.set_aside()
            if aside is not None:
                ctx.note(f"starting anew as asked; the earlier checkpoints are in {aside.name}")
            return None
        ref = store.latest()
        for word in store.prune():
            ctx.note(word)
        if ref is None:
            if ctx.plan.resume == "must" and ctx.generation == 0:
                raise ProblemsError("--resume must", [_nothing_to_resume(store)])
            return None
        for word in ref.notes:
            ctx.note(word)
        saved = store.saved_plan(ref)
        state = store.state(ref)
        problems = resume_differences(saved.config, ctx.plan.config, recorded_global_batch_size=state.global_batch_size)
        if problems:
            raise ProblemsError(f"the checkpoint of step {ref.step} is of another run", problems)
        for word in resume_notes(saved, ctx.plan):
            ctx.note(word)
        return ref

    found, _ = together(ctx, "load", 0, look)
    text = ctx.control.broadcast_text("" if found is None else found.to_json())
    return CheckpointRef.from_json(text) if text else None


def _nothing_to_resume(store: CheckpointStore) -> Problem:
    return Problem(
        path=str(store.folder),
        message="there is no checkpoint to resume from",
        fix="leave --resume out to start at step 0",
    )


def _load_data(ctx: Context) -> tuple[Any, PreparedData]:
    """Tokenizer and sets: rank 0 tokenises, then the others read its cache."""
    config = ctx.plan.config

    def load(at: Attempt, *, mine: bool) -> tuple[Any, tuple[str, ...], PreparedData] | None:
        at.enter("data")
        if not mine:
            return None
        tokenizer, words = load_tokenizer(config)
        request = DataRequest(
            data=config.data,
            task=config.model.task,
            model_max_length=model_max_length(config),
            num_labels=config.model.num_labels,
        )
        progress = partial(_tokenising, ctx) if ctx.is_main else None
        return tokenizer, words, prepare(request, tokenizer, progress=progress)

    first, _ = together(ctx, "load", 0, partial(load, mine=ctx.is_main))
    rest, _ = together(ctx, "load", 0, partial(load, mine=not ctx.is_main))
    loaded = first or rest
    assert loaded is not None
    tokenizer, words, data = loaded
    for word in (*words, *data.report.lines()):
        ctx.note(word)
    if ctx.is_main:
        ctx.events.write(
            "data",
            samples=len(data.train),
            eval_samples=0 if data.eval is None else len(data.eval),
            max_length=data.report.max_length,
            truncated=data.report.truncated,
            skipped=len(data.report.skipped),
        )
    return tokenizer, data


def _same_room(saved: Plan, current: Plan) -> bool:
    """Nothing that decides what fits has changed, so the caps that the ranks agreed on still hold."""
    training = [plan.config.training.model_dump(include=_DECIDE_WHAT_FITS) for plan in (saved, current)]
    return (
        saved.profile_kind == current.profile_kind
        and saved.device == current.device
        and saved.config.model.attn_implementation == current.config.model.attn_implementation
        and training[0] == training[1]
    )


_DECIDE_WHAT_FITS = {
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "max_tokens_per_micro_batch",
    "gradient_checkpointing",
    "gradient_checkpointing_layers",
    "loss_kernel",
}
"""Keys of `training`."""


def _tokenising(ctx: Context, done: int, total: int) -> None:
    ctx.console.progress(f"tokenising {done:,} of {total:,} samples")


def _load_model(ctx: Context, tokenizer: Any, data: PreparedData) -> ModelParts:
    def load(_: Attempt) -> ModelParts:
        ctx.injector.at("load", 0)
        return load_model(
            ctx.plan.config,
            tokenizer=tokenizer,
            profile=ctx.rank.profile,
            precision=ctx.rank.precision,
            device=ctx.rank.device,
            num_labels=ctx.plan.config.model.num_labels or len(data.report.label_names) or None,
        )

    parts, _ = together(ctx, "load", 0, load)
    for word in parts.notes:
        ctx.note(word)
    if ctx.is_main:
        parameters = list(parts.model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        base_bytes = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        ctx.events.write(
            "model",
            parameters=sum(p.numel() for p in parameters),
            trainable=trainable,
            base_bytes=base_bytes,
            attention=parts.attention.implementation,
            padding_free=parts.attention.flat,
            loss=parts.head.kernel,
        )
    return parts


def _spread(ctx: Context, parts: ModelParts) -> Strategy:
    make_optimizer = partial(build_optimizer, ctx.plan.config.training, device=ctx.rank.device)
    strategy, _ = together(
        ctx,
        "load",
        0,
        lambda _: spread(ctx.rank, parts.model, make_optimizer),
        collective=ctx.world_size > 1,
    )
    return strategy


def _resume(ctx: Context, job: Job, ref: CheckpointRef) -> None:
    """Restore the shared state of `ref` on every rank."""

    def restore(at: Attempt) -> None:
        at.enter("resume")
        state, adapter, optimizer = job.store.load(ref)
        problem = fingerprint_difference(state.fingerprint, job.order.fingerprint)
        if problem is not None:
            raise ProblemsError(f"the checkpoint of step {ref.step} is of other data", [problem])
        check_tensors(job.shapes, adapter)
        if ctx.plan.config.training.optim not in EIGHT_BIT:
            check_optimizer(job.shapes, optimizer)
        elif optimizer.keys() != job.shapes.keys():
            odd = sorted(optimizer.keys() ^ job.shapes.keys())
            raise UserError(f"the checkpoint's optimizer state does not fit the model: {', '.join(odd)}")
        job.strategy.load_trainable(adapter)
        job.strategy.load_optimizer_state(optimizer)
        job.scale.load(state.scaler)
        job.position = Position(step=state.step, epoch=state.epoch, consumed=state.consumed)
        job.order = replace(job.order, global_batch_size=state.global_batch_size)
        job.cost = Cost(**dict(zip("abc", state.cost, strict=False)))  # of earlier versions there is no c
        job.fit = CostFit(prior=job.cost)
        job.earlier_s = state.wall_s
        job.approximate = state.approximate
        # The caps of a generation that died are newer than those of its checkpoint.
        if ctx.generation == 0 and _same_room(job.store.saved_plan(ref), ctx.plan):
            ctx.policy = ctx.policy.resumed(
                step=state.step,
                train=state.caps,
                evaluation=state.eval_caps,
                checkpointing=state.checkpointing,
                skipped=state.skipped,
            )

    together(ctx, "load", 0, restore, collective=ctx.world_size > 1 and job.strategy.gathers)
    ctx.committed_step = job.position.step
    if ctx.is_main:
        ctx.events.write(
            "resume",
            step=job.position.step,
            epoch=job.position.epoch,
            consumed=job.position.consumed,
            checkpoint=ref.folder,
        )
        ctx.console.say(f"resumed from the checkpoint of step {ref.step} ({ref.folder})")
