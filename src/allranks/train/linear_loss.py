"""Output layer and cross-entropy in one, in pieces, for any torch: loss and gradient without whole logits."""

from __future__ import annotations

from typing import Any

import torch

_PIECE_ELEMENTS = 2**26
"""Logits that exist at a time: 256 MiB in fp32."""


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Sum of the weighted cross-entropies of logits = hidden · weightᵀ + bias.

    The gradient is computed on the way forward, piece by piece, for the logits are at hand there: softmax minus
    one-hot, times the target's weight, back through the matrix. Only `hidden` gets one: the layer is frozen.

    Args:
        hidden: [targets, width].
        weight: [vocabulary, width].
        bias: [vocabulary], or None.
        labels: [targets] int64.
        weights: [targets] fp32; with a loss scale in them, for a gradient of `hidden` in fp16 would underflow without.

    Returns:
        A scalar in fp32.
    """
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, weights, wants_gradient)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        wants_gradient: bool,
    ) -> torch.Tensor:
        rows = max(1, _PIECE_ELEMENTS // weight.shape[0])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if wants_gradient else None
        for start in range(0, hidden.shape[0], rows):
            piece = slice(start, start + rows)
            raw = torch.nn.functional.linear(hidden[piece], weight, bias)
            logits, at = raw.float(), labels[piece].unsqueeze(1)
            dtype = raw.dtype
            del raw
            normaliser = logits.logsumexp(1, keepdim=True)
            total += ((normaliser - logits.gather(1, at)).squeeze(1) * weights[piece]).sum()
            if gradient is not None:
                chances = logits.sub_(normaliser).exp_()
                chances.scatter_(1, at, chances.gather(1, at) - 1.0)
                gradient[piece] = chances.mul_(weights[piece].unsqueeze(1)).to(dtype) @ weight.to(dtype)
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient
        return gradient.mul_(outer[0].to(gradient.dtype)), None, None, None, None, None
