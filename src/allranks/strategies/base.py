"""What the loop asks of a way to spread the model over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

NamedTensors = dict[str, torch.Tensor]
"""Full fp32 tensors on the CPU, by the parameter's name in the unwrapped PEFT model."""

OptimizerState = dict[str, NamedTensors]
"""The optimizer's tensors of each parameter, e.g. ``{"…lora_A.default.weight": {"exp_avg": …, "step": …}}``."""

Keep = Callable[[torch.Tensor], torch.Tensor]
"""Makes a copy on the CPU that shares nothing with what is trained; called in the order of the result."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own."""
    return tensor.detach().to("cpu", copy=True)


class Strategy(Protocol):
    """One way to spread the model. Gradients of all ranks are summed, never averaged: the loss carries the scale.

    Attributes:
        lockstep: forward and backward contain collectives, so every rank runs the same number of micro-steps.
        gathers: reading parameters or optimizer state is a collective.
        whole_base: every rank holds the whole frozen base.
    """

    lockstep: bool
    gathers: bool
    whole_base: bool

    def forward(self, inputs: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        """Logits of one micro-batch: [batch, tokens, vocabulary], or [batch, tokens, classes]."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's scalar `loss` to what the step has so far."""
        ...

    def begin_step(self) -> None:
        """Zero the gradients; also what abandons a failed attempt."""
        ...

    def reserve(self) -> None:
        """Allocate what `reduce` needs, while a failure can still be voted on."""
        ...

    def reduce(self) -> float:
        """Sum the gradients over the ranks (collective); return their global L2 norm."""
        ...

    def step(self, learning_rate: float, coefficient: float) -> None:
        """Multiply the reduced gradients by `coefficient` and update the parameters (collective under ZeRO)."""
        ...

    def train_mode(self, training: bool) -> None:
        """Put the wrapped model in training or evaluation mode."""
        ...

    def trainable(self, keep: Keep = on_cpu) -> NamedTensors:
        """The trained parameters, as `keep` copies them (collective)."""
        ...

    def load_trainable(self, tensors: NamedTensors) -> None:
        """Set the trained parameters, masters included (collective)."""
        ...

    def gradients(self) -> NamedTensors:
        """The gradients after `reduce` and before `step` (collective)."""
        ...

    def optimizer_state(self, keep: Keep = on_cpu) -> OptimizerState:
        """The optimizer's state, as `keep` copies it (collective)."""
        ...

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Set the optimizer's state (collective)."""
        ...
