"""`single` and `ddp`: every rank holds the whole model; one all-reduce a step.

Forward and backward contain no collective: micro-steps accumulate into one flat fp32 buffer that was
allocated at start, and the buffer is summed over the ranks once, after the ranks agreed to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.strategies.base import Keep, NamedTensors, OptimizerState, on_cpu
from allranks.strategies.optim import allocate_state, restore_state, saved_state, set_learning_rate


class Replicated:
    """Strategy of the `single` and `ddp` profiles.

    Args:
        accelerator: the worker's `accelerate.Accelerator`.
        model: the PEFT model, on the accelerator's device; trained parameters are fp32.
        optimizer: over exactly the trained parameters.
    """

    lockstep = False
    gathers = False
    whole_base = True

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._world_size: int = accelerator.num_processes
        self._optimizer = optimizer
        self._model = accelerator.prepare_model(model)
        if self._world_size > 1 and not isinstance(self._model, DistributedDataParallel):
            raise RuntimeError(f"accelerate left the model as {type(self._model).__name__} on {self._world_size} ranks")
        self._flat = torch.zeros(
            sum(p.numel() for p in self._named.values()), dtype=torch.float32, device=accelerator.device
        )
        offset = 0
        self._views: NamedTensors = {}
        for name, p in self._named.items():
            self._views[name] = self._flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        allocate_state(optimizer, self._named.values())
        self.begin_step()

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return nullcontext()

    def forward(self, inputs: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        with self._no_sync():
            logits: torch.Tensor = self._model(**inputs).logits
        return logits

    def backward(self, loss: torch.Tensor) -> None:
        with self._no_sync():
            loss.backward()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        self._flat.zero_()
        for name, p in self._named.items():
            p.grad = self._views[name]

    def reserve(self) -> None:
        """Nothing: the flat buffer was allocated at start."""

    def reduce(self) -> float:
        if self._world_size > 1:
            dist.all_reduce(self._flat)
        return float(torch.linalg.vector_norm(self._flat))

    def step(self, learning_rate: float, coefficient: float) -> None:
        if coefficient != 1.0:
            self._flat.mul_(coefficient)
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()

    def train_mode(self, training: bool) -> None:
        self._model.train(training)

    def trainable(self, keep: Keep = on_cpu) -> NamedTensors:
        return {name: keep(p) for name, p in self._named.items()}

    def load_trainable(self, tensors: NamedTensors) -> None:
        with torch.no_grad():
            for name, p in self._named.items():
                p.copy_(tensors[name])

    def gradients(self) -> NamedTensors:
        return {name: on_cpu(view) for name, view in self._views.items()}

    def optimizer_state(self, keep: Keep = on_cpu) -> OptimizerState:
        return {name: saved_state(self._optimizer.state[p], keep) for name, p in self._named.items()}

    def load_optimizer_state(self, state: OptimizerState) -> None:
        for name, p in self._named.items():
            restore_state(self._optimizer.state[p], state[name], name)
