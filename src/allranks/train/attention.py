"""Which attention kernel a run takes: the first rung of the ladder that works, and why not one further up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allranks.data.collate import ModelInputs, flat_batch, on_device
from allranks.data.tokens import Tokens
from allranks.errors import UserError
from allranks.train.varlen import VARLEN, register_varlen, wanting

FLAT = ("flash_attention_3", "flash_attention_2", VARLEN)
"""Kernels that take samples of any lengths as one flat sequence."""
LADDER = ("flash_attention_2", VARLEN, "sdpa", "eager")
"""What ``auto`` tries, in this order."""

_AMPERE = (8, 0)
_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A kernel, and how samples come to it.

    Attributes:
        implementation: name by which transformers knows it.
        flat: micro-batches are one flat sequence without padding.
        words: why it is not one further up the ladder; empty if nothing needs to be said.
    """

    implementation: str
    flat: bool
    words: tuple[str, ...] = ()


def choose_attention(wanted: str, device: torch.device, precision: str, unfit: dict[str, str]) -> Attention:
    """The kernel for `model.attn_implementation`.

    Args:
        wanted: ``auto``, or a kernel by name.
        device: where the model is.
        precision: ``bf16``, ``fp16`` or ``no``.
        unfit: kernels that the model itself has refused, and its reason.

    Raises:
        UserError: a kernel was named that does not work here.
    """
    register_varlen()
    if wanted != "auto":
        lack = unfit.get(wanted) or _lack(wanted, device, precision, asked=True)
        if lack is not None:
            raise UserError(
                f"model.attn_implementation: {wanted}: {lack}\n"
                "    fix: set model.attn_implementation: auto, which takes the fastest one that works"
            )
        return Attention(implementation=wanted, flat=wanted in FLAT)
    lacks: dict[str, str] = {}
    for rung in LADDER:
        lack = unfit.get(rung) or _lack(rung, device, precision, asked=False)
        if lack is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in lacks.items())
            words = (f"attention by {rung} ({reasons})",) if reasons else ()
            return Attention(implementation=rung, flat=rung in FLAT, words=words)
        lacks[rung] = lack
    raise UserError("model: no attention kernel works: " + "; ".join(f"{name}: {why}" for name, why in lacks.items()))


def _lack(rung: str, device: torch.device, precision: str, *, asked: bool) -> str | None:
    """Why `rung` does not work here; None if it does."""
    if rung not in FLAT or (rung == VARLEN and asked and device.type == "cpu"):
        return None
    if device.type != "cuda":
        return "needs a GPU"
    if precision == "no":
        return "computes in bf16 or fp16, and the run in fp32"
    needed = _HOPPER if rung == "flash_attention_3" else _AMPERE
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, and this GPU has {found[0]}.{found[1]}"
    return _not_installed(rung)


def _not_installed(rung: str) -> str | None:
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if rung == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed"
    if rung == "flash_attention_3" and not is_flash_attn_3_available():
        return "flash-attn 3 is not installed"
    if rung == VARLEN:
        try:
            import torch.nn.attention.varlen
        except ImportError:
            return f"torch {torch.__version__} has no varlen_attn"
    return None


_BEFORE_TOKENS, _PROBE_TOKENS = 48, 4
_WORTH = 0.25
"""Of what the tokens before it change in a sample when they are its own: what they may change when they are not."""


def keeps_samples_apart(
    forward: Callable[[ModelInputs], torch.Tensor], *, vocabulary: int, classes: bool, device: torch.device
) -> bool:
    """Whether a sample has the same logits behind another one in a flat sequence as by itself.

    Collective where `forward` is.

    Args:
        forward: of the model in evaluation mode; from inputs to logits.
        vocabulary: token ids to choose from.
        classes: the model is a classifier: one row of logits for each sample.
        device: where `forward` computes.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (_BEFORE_TOKENS + _PROBE_TOKENS,), generator=generator).tolist()
    before, probe = ids[:_BEFORE_TOKENS], ids[_BEFORE_TOKENS:]

    def logits_of_the_last(*samples: list[int]) -> torch.Tensor:
        tokens = [Tokens(input_ids=of, labels=of[:1] if classes else of) for of in samples]
        batch = on_device(flat_batch(tokens, 0), device)
        del batch["labels"]
        with torch.no_grad():
            logits = forward(batch).float()
        return logits[-1] if classes else logits[0, -_PROBE_TOKENS:]

    alone = logits_of_the_last(probe)
    behind = float((logits_of_the_last(before, probe) - alone).abs().max())
    within = float((logits_of_the_last(before + probe) - alone).abs().max())
    return behind <= _WORTH * within


def fitting(base: Any, attention: Attention) -> Attention:
    """`attention`, or padded rows where the architecture of the loaded `base` can't take a flat sequence."""
    if not attention.flat:
        return attention
    if not base.is_backend_compatible():
        return padded(base, attention, "it has attention layers of its own, which take no sample boundaries")
    if attention.implementation == VARLEN and (lack := wanting(base)) is not None:
        return padded(base, attention, f"the kernel has no {lack}")
    if hasattr(base.config, "num_labels") and "Classification" in type(base).__name__ and not pool_at_ends(base):
        return padded(base, attention, "it does not pool as transformers' generic classifier does")
    return attention


def padded(base: Any, attention: Attention, why: str) -> Attention:
    """The fallback of a model that would mix the samples of a flat sequence."""
    kernel = "sdpa" if base._supports_sdpa else "eager"
    base.set_attn_implementation(kernel)
    name = type(base).__name__
    word = f"{name} can't train without padding by {attention.implementation}: {why}; attention by {kernel}"
    return Attention(implementation=kernel, flat=False, words=(*attention.words, word))


def pool_at_ends(classifier: Any) -> bool:
    """Have a classifier of transformers take the last token of each sample of a flat sequence, not of each row.

    Returns:
        False, and nothing is changed: it is built in another way than transformers' generic classifier.
    """
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    if not isinstance(classifier, GenericForSequenceClassification):
        return False
    of_rows = classifier.forward

    def forward(*arguments: Any, cu_seq_lens_q: torch.Tensor | None = None, **named: Any) -> Any:
        if cu_seq_lens_q is None:
            return of_rows(*arguments, **named)
        named = {name: value for name, value in named.items() if name not in ("labels", "return_dict")}
        body = getattr(classifier, classifier.base_model_prefix)
        hidden = body(*arguments, cu_seq_lens_q=cu_seq_lens_q, **named).last_hidden_state
        return SequenceClassifierOutputWithPast(logits=classifier.score(hidden[0, cu_seq_lens_q[1:].long() - 1]))

    classifier.forward = forward
    return True
