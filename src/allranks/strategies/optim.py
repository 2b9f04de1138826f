"""The optimizers: built, proven to work, their state allocated before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from allranks.config.schema import TrainingConfig
from allranks.errors import UserError
from allranks.strategies.base import Keep

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")


def build_optimizer(
    config: TrainingConfig, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """AdamW as `config.optim` says, over `parameters`.

    Raises:
        UserError: an 8-bit optimizer was asked for and bitsandbytes does not work on `device`.
    """
    arguments: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.optim not in EIGHT_BIT:
        return torch.optim.AdamW(parameters, fused=True, **arguments)
    eight_bit = _eight_bit_class(config.optim)
    _prove(eight_bit, config.optim, device)
    optimizer: torch.optim.Optimizer = eight_bit(parameters, **arguments)
    return optimizer


def _eight_bit_class(name: str) -> Any:
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise UserError(
            f"training.optim: {name} needs bitsandbytes, which does not import: {error}\n"
            "    fix: pip install bitsandbytes, or set training.optim to adamw_torch_fused"
        ) from error
    return bnb.optim.PagedAdamW8bit if name == "paged_adamw_8bit" else bnb.optim.AdamW8bit


def _prove(eight_bit: Any, name: str, device: torch.device) -> None:
    """Update one small tensor; 4,096 elements is the least that bitsandbytes keeps in 8 bits."""
    probe = torch.nn.Parameter(torch.ones(8192, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        optimizer = eight_bit([probe], lr=0.1)
        optimizer.step()
        moved = bool((probe.detach() < 1.0).all())
        in_eight_bits = optimizer.state[probe]["state1"].dtype == torch.uint8
    except Exception as error:  # any fault of a native library counts: the user gets one clear error
        raise UserError(
            f"training.optim: {name} does not work here: {type(error).__name__}: {error}\n"
            f"    fix: install a bitsandbytes built for this {device.type} device, or set adamw_torch_fused"
        ) from error
    if not (moved and in_eight_bits):
        raise UserError(
            f"training.optim: {name} ran, but did not update a test tensor in 8 bits\n"
            f"    fix: install a bitsandbytes built for this {device.type} device, or set adamw_torch_fused"
        )


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Create the state that the first step would create, so that no step ever allocates it."""
    for index, parameter in enumerate(parameters):
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        else:
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)  # type: ignore[attr-defined]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The rate of the next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def saved_state(state: Mapping[str, Any], keep: Keep) -> dict[str, torch.Tensor]:
    """One parameter's state as tensors that `keep` made; bitsandbytes counts the steps in a plain int."""
    return {key: keep(torch.as_tensor(value)) for key, value in state.items()}


def restore_state(state: dict[str, Any], saved: Mapping[str, torch.Tensor], name: str) -> None:
    """Copy `saved` into the allocated `state` of the parameter `name`, in place: paged memory stays paged.

    Raises:
        UserError: a field is missing, unknown, or of another shape; nothing was copied.
    """
    wanted, found = ({key: tuple(torch.as_tensor(v).shape) for key, v in of.items()} for of in (state, saved))
    if wanted != found:
        raise UserError(
            f"the checkpoint's optimizer state of {name} has {found}, and this run's has {wanted}\n"
            "    fix: resume with the training.optim of the first launch, or start anew with --resume never"
        )
    for key, value in saved.items():
        if torch.is_tensor(state[key]):
            state[key].copy_(value)
        else:
            state[key] = int(value)
