"""The frozen base must be the same bytes on every rank, and in the forward pass of every profile.

A published FSDP recipe breaks the second: sharded bytes stay right while the gathered ones are rewritten, so only
a look inside forward can tell.
"""

from __future__ import annotations

from typing import Any

import torch

from allranks.coordinator.agreement import ControlPlane
from allranks.errors import ExitCode, StopTraining
from allranks.strategies.base import Strategy

_PROBE_TOKENS = 8
_CHUNK_BYTES = 2**25
"""Looked at together: the check must not need memory that training does not."""
_PRIME = 2**48 - 59
"""A prime, so that every bit of a 64-bit sum counts; below 2**53, so that it travels exactly in a vote."""


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the tensor's bytes and their places, below 2**48; equal bytes of any dtype give equal sums."""
    content = tensor.detach().contiguous().view(torch.uint8).flatten()
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, content.numel(), _CHUNK_BYTES):
        chunk = content[start : start + _CHUNK_BYTES]
        if chunk.numel() % 8:
            chunk = torch.cat([chunk, chunk.new_zeros(-chunk.numel() % 8)])
        words = chunk.view(torch.int64)
        # Wrapping int64 arithmetic; the odd multipliers make the sum depend on where each word stands.
        first = start // 8
        places = torch.arange(first, first + words.numel(), device=words.device, dtype=torch.int64) * 2 + 1
        total += (words * places).sum()
    return int(total.item()) % _PRIME


def packed_weights(model: torch.nn.Module) -> dict[str, int]:
    """Checksum of each 4-bit weight, by the name of its layer, before the model is spread."""
    return {
        name: checksum(module.weight) for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"
    }


def require_equal_on_all_ranks(control: ControlPlane, model: torch.nn.Module) -> None:
    """Compare every parameter and buffer, trained ones included, over the ranks.

    Raises:
        StopTraining: they differ: the ranks loaded different models.
    """
    total = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        total = (total * 31 + len(name) + checksum(tensor)) % _PRIME
    sums = [row[0] for row in control.exchange([float(total)])]
    if len(set(sums)) > 1:
        odd = [rank for rank, value in enumerate(sums) if value != sums[0]]
        raise StopTraining(
            "failure",
            f"ranks {odd} loaded another model than rank 0\n"
            "    fix: give all nodes the same model files and the same versions of the libraries",
            ExitCode.USAGE,
        )


def weights_seen_in_forward(strategy: Strategy, model: Any, device: torch.device) -> dict[str, int]:
    """Checksum of each 4-bit weight that its layer really sees in one short forward pass (collective)."""
    seen: dict[str, int] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda layer, _inputs, name=name: seen.__setitem__(name, checksum(layer.weight))
        )
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    ]
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device)
    strategy.train_mode(False)
    try:
        with torch.no_grad():
            strategy.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def require_intact(control: ControlPlane, before: dict[str, int], seen: dict[str, int]) -> None:
    """Compare what forward saw with what was loaded, on all ranks.

    Raises:
        StopTraining: the profile changes 4-bit weights on some rank.
    """
    changed = sorted(name for name, value in before.items() if seen.get(name) != value)
    by_rank = [int(row[0]) for row in control.exchange([float(len(changed))])]
    if any(by_rank):
        example = f", {changed[0]} for one" if changed else ""
        raise StopTraining(
            "failure",
            f"of {len(before)} 4-bit weights, {by_rank} by rank are other bytes in the forward pass than were loaded"
            f"{example}\n    fix: set quantization.bnb_4bit_quant_storage: auto, or use another profile",
            ExitCode.CRASH,
        )
