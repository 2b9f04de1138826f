"""`fsdp`: PyTorch's FSDP2; base and adapter are sharded, and gathered layer by layer.

The model is wrapped here and not by `accelerator.prepare`, for two contracts that accelerate breaks:
on CPU ranks it leaves the model unwrapped without a word, and its bf16 policy casts the fp32 adapter to the dtype
of the packed 4-bit weights, whose bytes the gather then rewrites where they look like NaN (bitsandbytes#1945).
Every value of the profile is still taken from accelerate's plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from allranks.errors import UserError
from allranks.strategies.base import Keep, NamedTensors, OptimizerState, on_cpu
from allranks.strategies.optim import allocate_state, set_learning_rate


class Fsdp:
    """Strategy of the `fsdp` profile.

    Args:
        accelerator: the worker's `accelerate.Accelerator`.
        plugin: accelerate's FullyShardedDataParallelPlugin, with the profile's values.
        model: the PEFT model, on the accelerator's device; trained parameters are fp32.
        make_optimizer: builds the optimizer over the sharded parameters.
    """

    lockstep = True
    gathers = True
    whole_base = False

    def __init__(self, accelerator: Any, plugin: Any, model: torch.nn.Module, make_optimizer: Any) -> None:
        self._accelerator = accelerator
        self._model = model
        wrapped = set(plugin.transformer_cls_names_to_wrap or ())
        layers = [module for module in model.modules() if type(module).__name__ in wrapped]
        if not layers:
            has = ", ".join(sorted(getattr(model, "_no_split_modules", None) or ())) or "look at print(model)"
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap: the model has no layer of class {', '.join(sorted(wrapped))}\n"
                f"    valid: {has}\n"
                "    fix: take a copy (allranks profiles cp fsdp my.yaml), name the class of the model's layers there, "
                "and run with --profile my.yaml"
            )
        mesh = dist.device_mesh.init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward)
        for module in (model, *layers):
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # sums: the loss carries the scale
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if unsharded:
            raise RuntimeError(f"FSDP left {len(unsharded)} parameters whole, {unsharded[0]} among them")
        self._optimizer = make_optimizer(self._named.values())
        allocate_state(self._optimizer, self._named.values())
        self.begin_step()

    def forward(self, inputs: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        with self._accelerator.autocast():
            logits: torch.Tensor = self._model(**inputs).logits
        return logits

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        for p in self._named.values():
            p.grad = None

    def reserve(self) -> None:
        """Nothing: FSDP reduces in backward."""

    def reduce(self) -> float:
        """The gradients were summed in backward; a parameter that no sample reached gets zeros."""
        for p in self._named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        squares = torch.stack([_local(p.grad).square().sum() for p in self._named.values()]).sum()
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def step(self, learning_rate: float, coefficient: float) -> None:
        if coefficient != 1.0:
            for p in self._named.values():
                _local(p.grad).mul_(coefficient)
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()

    def train_mode(self, training: bool) -> None:
        self._model.train(training)

    def trainable(self, keep: Keep = on_cpu) -> NamedTensors:
        return {name: keep(_whole(p)) for name, p in self._named.items()}

    def load_trainable(self, tensors: NamedTensors) -> None:
        with torch.no_grad():
            for name, p in self._named.items():
                _fill(p, tensors[name])

    def gradients(self) -> NamedTensors:
        return {name: on_cpu(_whole(p.grad)) for name, p in self._named.items()}

    def optimizer_state(self, keep: Keep = on_cpu) -> OptimizerState:
        return {
            name: {key: keep(_whole(value)) for key, value in self._optimizer.state[p].items()}
            for name, p in self._named.items()
        }

    def load_optimizer_state(self, state: OptimizerState) -> None:
        for name, p in self._named.items():
            for key, value in self._optimizer.state[p].items():
                _fill(value, state[name][key])


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local()
    return local


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """The full tensor on its device (collective if it is sharded).

    By one plain all-gather: `DTensor.full_tensor` goes through functional collectives, which crash on CUDA tensors
    over gloo (seen with torch 2.11, two ranks on one GPU).
    """
    assert tensor is not None
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    world_size = tensor.device_mesh.size()
    rows = -(-tensor.shape[0] // world_size)
    shard = _local(tensor).detach()
    padded = shard.new_zeros(rows, *tensor.shape[1:])
    padded[: shard.shape[0]] = shard
    gathered = shard.new_empty(rows * world_size, *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, padded)
    return gathered[: tensor.shape[0]]


def _fill(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's shard of `full` into `target`, in place."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    shard = _local(target)
    rows = -(-target.shape[0] // target.device_mesh.size())
    first = rows * target.device_mesh.get_rank()
    shard.copy_(full[first : first + shard.shape[0]])
