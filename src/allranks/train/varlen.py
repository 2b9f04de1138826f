"""`varlen_attn`: the FlashAttention-2 kernels inside torch, made known to transformers under that name.

On a GPU it is `torch.nn.attention.varlen.varlen_attn`; on a CPU, which lacks the kernel, each sample goes through
torch's `scaled_dot_product_attention` by itself: the same mathematics, without padding either.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from allranks.errors import UserError

VARLEN = "varlen_attn"


@cache
def register_varlen() -> None:
    """Make the name known to transformers in this process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(VARLEN, _attention)
    AttentionMaskInterface.register(VARLEN, _mask)


def wanting(model: Any) -> str | None:
    """What the attention of a loaded model of transformers needs that the kernel lacks; None if it has all."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped scores"
    if (getattr(config, "attention_dropout", None) or 0.0) > 0:
        return "dropout of attention weights"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "attention sinks"
    return None


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for a flat sequence; for padded rows, as in generation, what `sdpa` takes."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return mask


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a flat sequence.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head size]; `key` and `value` may have fewer heads.
        attention_mask: None, or a mask of padded rows.
        scaling: of the scores; None: one over the root of the head size.
        dropout: of the attention weights; the kernel has none.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        cu_seq_lens_q: int32, [samples + 1]: where each sample begins, and the end.
        max_length_q: tokens of the longest sample.

    Returns:
        [1, tokens, heads, head size], and no weights.

    Raises:
        UserError: the model asks for what the kernel lacks.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return padded
    lacking = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if dropout > 0:
        lacking.append("attention_dropout")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        lacking.append("attention to later tokens")
    if lacking:
        raise UserError(
            f"model.attn_implementation: {VARLEN} has no {', '.join(lacking)}, which this model asks for\n"
            "    fix: set model.attn_implementation: eager"
        )
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    on_gpu = query.device.type == "cuda"
    # Norms and rotations in fp32 leave their dtype behind; the kernel knows only two.
    dtype = torch.get_autocast_dtype("cuda") if on_gpu and value.dtype == torch.float32 else value.dtype
    q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    if not on_gpu:
        return _one_by_one(q, k, v, cu_seq_lens_q, scaling, window[0])[None], None
    assert max_length_q is not None
    grouped: dict[str, Any] = {"enable_gqa": True} if _wants_gqa_said() and key.shape[1] != query.shape[1] else {}
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=window,
        **grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out[None], None


@cache
def _wants_gqa_said() -> bool:
    """torch 2.13 does, 2.11 takes fewer key heads as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float | None, before: int
) -> torch.Tensor:
    """[tokens, heads, head size] of each; `before`: tokens that a token sees before itself, -1: all."""
    outs = []
    for parts in zip(*(x.tensor_split(starts[1:-1].long()) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1)[None] for part in parts)
        n = one_q.shape[2]
        near = None
        if 0 <= before < n:
            near = torch.ones(n, n, dtype=torch.bool).tril().triu(-before)
        out = F.scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=near, is_causal=near is None, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
