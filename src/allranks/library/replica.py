"""The model of a loop that is not ours: whether a failed step can be taken again with it, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from allranks.errors import UserError

_SPREAD_ADVICE = "fix: use DDP or one process here; `allranks run` has profiles for zero2, zero3 and fsdp"


class Replica:
    """A whole model on this rank, with one fp32 buffer for the gradients of a global batch.

    Micro-steps add to the buffer without any collective; it travels once, when all ranks have agreed. Parameters
    in fp32 accumulate in it directly, others have a gradient of their own dtype for the length of one micro-step.
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module) -> None:
        """Check the model and allocate the buffer.

        Raises:
            UserError: a step of this model can't be taken again; the message has the fix.
        """
        _check_accelerator(accelerator)
        _check_model(accelerator, model)
        if isinstance(model, DistributedDataParallel):
            # DDP would broadcast them in forward: a collective in which a failed rank leaves its peers.
            model.broadcast_buffers = False
        self._model = model
        self._world_size: int = accelerator.num_processes
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self._parameters[0].device
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float32, device=self.device)
        parts = torch.split(self._flat, [p.numel() for p in self._parameters])
        self._views = [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]

    def begin(self) -> None:
        """Forget what earlier attempts have left."""
        self._flat.zero_()
        self._expose()

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Forward and backward in here add to the buffer of this rank and reach no other."""
        with self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else nullcontext():
            yield
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is not None and p.grad is not view:
                view.add_(p.grad)
        self._expose()

    def reduce(self, divisor: float) -> torch.Tensor:
        """Sum the buffer over the ranks and divide it; its norm, a scalar on the device."""
        if self._world_size > 1:
            dist.all_reduce(self._flat)
        self._flat.div_(divisor)
        norm: torch.Tensor = torch.linalg.vector_norm(self._flat)
        return norm

    def hand_over(self) -> None:
        """Give each parameter its gradient, for the optimizer."""
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view if p.dtype == torch.float32 else view.to(p.dtype)

    def scale(self, factor: float) -> None:
        """Multiply the gradients that were handed over."""
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)

    def clear(self) -> None:
        """Take the gradients away from the parameters."""
        for p in self._parameters:
            p.grad = None

    def require_parameters_of(self, optimizer: Any) -> None:
        """Check that the optimizer trains this model.

        Raises:
            UserError: it holds parameters that are not the model's, or none of those that are trained.
        """
        mine = set(map(id, self._parameters))
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if theirs - mine or not theirs:
            raise UserError(
                f"of the {len(theirs)} trained parameters in the optimizer, {len(theirs - mine)} are not the model's "
                f"({len(mine)})\n    fix: make the optimizer of the same model that goes through accelerator.prepare"
            )

    def _expose(self) -> None:
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view if p.dtype == torch.float32 else None


def _check_accelerator(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(
            f"accelerate runs this model under {kind}, whose forward and backward contain collectives, so that a "
            f"failed rank leaves its peers in them\n    valid: DDP, one process\n    {_SPREAD_ADVICE}"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}): the coordinator "
            "accumulates itself\n    fix: leave it at 1 and give step() all samples of this rank for one optimizer step"
        )


def _check_model(accelerator: Any, model: torch.nn.Module) -> None:
    if hasattr(model, "_orig_mod") or isinstance(model, DataParallel):
        raise UserError(
            f"the model is wrapped as {type(model).__name__}, of which nothing is promised here\n    valid: the model "
            "itself, DistributedDataParallel\n    fix: compile its layers before accelerator.prepare, or nothing; "
            "start one process per GPU"
        )
    if any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters()):
        raise UserError(
            f"the parameters of the model are sharded over the ranks\n    valid: DDP, one process\n    {_SPREAD_ADVICE}"
        )
    if accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
        raise UserError(
            f"the model is a {type(model).__name__} on {accelerator.num_processes} ranks, not DistributedDataParallel\n"
            "    fix: give the model that accelerator.prepare returned"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError(
            "the model has no parameter that requires a gradient\n    fix: unfreeze some, or add an adapter"
        )
    if len({p.device for p in trained}) > 1:
        raise UserError(
            "the trained parameters lie on several devices\n    fix: load the model on one device per process, not "
            "with device_map='auto'"
        )
    if accelerator.scaler is not None and any(p.dtype == torch.float16 for p in trained):
        raise UserError(
            "trained parameters are fp16, which torch's GradScaler refuses to unscale\n    fix: keep them in fp32, "
            "mixed_precision='fp16' computes in fp16 all the same"
        )
    norms = sorted({type(module).__name__ for module in model.modules() if isinstance(module, _BatchNorm)})
    if norms:
        raise UserError(
            f"{', '.join(norms)}: batch normalisation makes the loss depend on the size of a micro-batch, which "
            "changes here\n    fix: use a model without it, or with GroupNorm or LayerNorm"
        )
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model)


def _check_ddp(model: DistributedDataParallel) -> None:
    if model.static_graph:
        raise UserError(
            "DDP has static_graph=True, which makes it reduce gradients in the first backward whatever it is told\n"
            "    fix: leave static_graph=False in DistributedDataParallelKwargs"
        )
    if model._comm_hooks:
        raise UserError(
            "DDP has a communication hook, but the coordinator reduces the gradients itself, in fp32\n"
            "    fix: leave comm_hook out of DistributedDataParallelKwargs"
        )
    if model.mixed_precision is not None:
        raise UserError("DDP has mixed_precision of its own\n    fix: use Accelerator(mixed_precision=...) instead")
