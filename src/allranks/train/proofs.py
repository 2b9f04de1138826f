"""What all ranks try on the spread model before the first step: do the kernels give what they should?"""

from __future__ import annotations

from typing import Any

from allranks.errors import ExitCode, StopTraining
from allranks.strategies.base import Strategy
from allranks.train.attention import Attention, keeps_samples_apart, padded
from allranks.train.context import Context
from allranks.train.head import agrees, works
from allranks.train.model import COMPUTE_DTYPE, ModelParts
from allranks.train.together import Attempt, together


def proven_attention(ctx: Context, parts: ModelParts, strategy: Strategy, tokenizer: Any) -> Attention:
    """The kernel of all ranks; padded rows where a sample sees the one before it in a flat sequence."""
    attention = parts.attention
    if not attention.flat:
        return attention

    def probe(_: Attempt) -> bool:
        strategy.train_mode(False)
        return keeps_samples_apart(
            strategy.forward,
            vocabulary=min(len(tokenizer), parts.model.get_input_embeddings().num_embeddings),
            classes=ctx.plan.config.model.task == "sequence-classification",
            device=ctx.rank.device,
        )

    apart, _ = together(ctx, "load", 0, probe, collective=strategy.lockstep and ctx.world_size > 1)
    if all(row[0] for row in ctx.control.exchange([float(apart)])):
        return attention
    attention = padded(parts.model.get_base_model(), attention, "a sample sees the one before it")
    ctx.note(attention.words[-1])
    return attention


def prove_loss(ctx: Context, parts: ModelParts, strategy: Strategy, tokenizer: Any) -> None:
    """Have all ranks take another kernel, or whole logits, where the loss is another one on one of them.

    Raises:
        StopTraining: so it is, and the kernel was asked for by name.
    """
    head, device, dtype = parts.head, ctx.rank.device, COMPUTE_DTYPE[ctx.rank.precision]
    while head.kernel != "logits":
        wrong, _ = together(ctx, "load", 0, lambda _: works(head, device, dtype))
        if not any(row[0] for row in ctx.control.exchange([float(wrong is not None)])):
            break
        why = wrong or f"{head.kernel} fails on another rank"
        _require_free_choice(ctx, why)
        head.step_down(why)
        ctx.note(head.words[-1])
    if head.kernel == "logits":
        return

    def probe(_: Attempt) -> bool:
        strategy.train_mode(False)
        vocabulary = min(len(tokenizer), parts.model.get_input_embeddings().num_embeddings)
        return agrees(head, strategy.forward, vocabulary=vocabulary, device=device, dtype=dtype)

    same, _ = together(ctx, "load", 0, probe, collective=strategy.lockstep and ctx.world_size > 1)
    if not all(row[0] for row in ctx.control.exchange([float(same)])):
        why = f"{type(parts.model.get_base_model()).__name__} does more with its logits than {head.kernel} can"
        _require_free_choice(ctx, why)
        head.give_up(why)
        ctx.note(head.words[-1])


def _require_free_choice(ctx: Context, why: str) -> None:
    wanted = ctx.plan.config.training.loss_kernel
    if wanted != "auto":
        words = f"training.loss_kernel: {wanted} does not work here: {why}\n    fix: set it to auto, or logits"
        raise StopTraining("failure", words, ExitCode.USAGE)
