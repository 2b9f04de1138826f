"""This rank's place among the others: process groups, device, profile, as accelerate configured them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from allranks import environment
from allranks.coordinator.agreement import ControlPlane
from allranks.errors import UserError
from allranks.plan.plan import ProfileKind
from allranks.strategies.base import Strategy

DATA_PLANE_TIMEOUT_S = 1800
"""How long a collective of the data plane may wait; the control plane's votes may wait for hours."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, joined.

    Attributes:
        accelerator: accelerate's own object; it holds every value of the profile.
        environment: rank, world size and so on.
        profile: how the model is spread, as accelerate was configured.
        precision: ``bf16``, ``fp16`` or ``no``.
        notes: what differs from what was asked, one line each.
    """

    accelerator: Any
    environment: environment.RankEnvironment
    profile: ProfileKind
    precision: str
    notes: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        device: torch.device = self.accelerator.device
        return device


def configured_profile() -> ProfileKind:
    """The profile, from what `accelerate launch` put into the environment.

    Raises:
        UserError: accelerate was configured for something that is none of the profiles.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage == "2":
            return "zero2"
        if stage == "3":
            return "zero3"
        raise UserError(f"zero_stage: {stage} is not supported\n    valid: 2, 3\n    fix: use profiles/zero2.yaml")
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        version = environment.get("FSDP_VERSION")
        if version != "2":
            raise UserError(f"fsdp_version: {version} is not supported\n    valid: 2\n    fix: use profiles/fsdp.yaml")
        return "fsdp"
    return "ddp" if environment.rank_environment().world_size > 1 else "single"


def join(profile: ProfileKind, precision: str) -> Rank:
    """Start the process groups through accelerate.

    Ranks on CPUs, and ranks that share a GPU (NCCL refuses two on one), talk over gloo.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    place = environment.rank_environment()
    cuda = torch.cuda.is_available()
    notes = []
    # DDP would broadcast buffers in every forward: a collective where there must be none.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    if place.world_size > 1:
        shared = cuda and place.local_world_size > torch.cuda.device_count()
        if shared:
            notes.append(
                f"{place.local_world_size} ranks share {torch.cuda.device_count()} GPU(s): they talk over gloo, slowly"
            )
        handlers.append(
            InitProcessGroupKwargs(
                backend="gloo" if shared or not cuda else "nccl", timeout=timedelta(seconds=DATA_PLANE_TIMEOUT_S)
            )
        )
    elif profile != "single":
        raise UserError(
            f"profile {profile} runs on several ranks, and there is one\n    fix: --profile single, or --gpus 2"
        )
    # With cpu=True accelerate ignores DeepSpeed; without it, it finds the CPU itself.
    cpu = not cuda and not profile.startswith("zero")
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=handlers)
    if accelerator.num_processes != place.world_size:
        raise RuntimeError(f"accelerate sees {accelerator.num_processes} ranks, torchrun started {place.world_size}")
    return Rank(accelerator=accelerator, environment=place, profile=profile, precision=precision, notes=tuple(notes))


def spread(rank: Rank, model: torch.nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Strategy:
    """Wrap `model` as the profile says."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if rank.profile in ("single", "ddp"):
        from allranks.strategies.replicated import Replicated

        return Replicated(rank.accelerator, model, make_optimizer(trainable))
    if rank.profile in ("zero2", "zero3"):
        from allranks.strategies.zero import Zero

        return Zero(rank.accelerator, model, make_optimizer(trainable))
    from accelerate.utils import FullyShardedDataParallelPlugin

    from allranks.strategies.fsdp import Fsdp

    # On CPU ranks accelerate drops the plugin; it reads the profile from the environment in either case.
    plugin = getattr(rank.accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    return Fsdp(rank.accelerator, plugin, model, make_optimizer)


def joined_control(rank: Rank) -> ControlPlane:
    """The control plane over all ranks; every rank calls this at the same place."""
    return ControlPlane(rank=rank.environment.rank, world_size=rank.environment.world_size)


def leave(control: ControlPlane) -> None:
    """Take the process groups down, when all ranks have agreed to go."""
    control.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
