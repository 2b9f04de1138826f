"""The optimizers, 8-bit ones included: what is saved is all that the next update needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allranks.config.schema import TrainingConfig
from allranks.errors import UserError
from allranks.strategies.base import on_cpu
from allranks.strategies.optim import allocate_state, build_optimizer, restore_state, saved_state

ELEMENTS = 8192
"""bitsandbytes keeps the state of fewer than 4,096 elements in 32 bits."""


def _optimizer(optim: str, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    config = TrainingConfig.model_validate({"optim": optim, "learning_rate": 1e-2})
    optimizer = build_optimizer(config, [weight], torch.device("cpu"))
    allocate_state(optimizer, [weight])
    return optimizer


def _steps(optimizer: Any, weight: torch.nn.Parameter, numbers: range) -> None:
    for number in numbers:
        weight.grad = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))
        optimizer.step()


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_a_restored_optimizer_goes_on_as_if_never_stopped(optim: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = _optimizer(optim, weight)
    _steps(optimizer, weight, range(3))
    state, at_three = saved_state(optimizer.state[weight], on_cpu), weight.detach().clone()
    _steps(optimizer, weight, range(3, 6))

    again = torch.nn.Parameter(at_three)
    restored = _optimizer(optim, again)
    restore_state(restored.state[again], state, "w")
    _steps(restored, again, range(3, 6))
    assert torch.equal(again, weight)


def test_state_that_lacks_a_field_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = _optimizer("adamw_8bit", weight)
    state = saved_state(optimizer.state[weight], on_cpu)
    del state["step"]
    with pytest.raises(UserError, match=r"optimizer state of layer.w has .*absmax1.*\n    fix: resume with"):
        restore_state(optimizer.state[weight], state, "layer.w")
