"""This rank's place among the others: process groups, device, profile, as accelerate configured them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import yaml

from allranks import environment
from allranks.coordinator.agreement import ControlPlane
from allranks.errors import AllranksError, ExitCode, UserError
from allranks.plan.plan import ProfileKind
from allranks.strategies.base import Strategy
from allranks.units import human_seconds

DATA_PLANE_TIMEOUT_S = 1800
"""How long a collective of the data plane may wait; the control plane's votes may wait for hours."""

LEAST_PATIENCE_S = 60.0
"""For ranks that start at the same time: libraries take that long to load from a cold disk."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, joined.

    Attributes:
        accelerator: accelerate's own object; it holds every value of the profile.
        environment: rank, world size and so on.
        profile: how the model is spread, as accelerate was configured.
        precision: ``bf16``, ``fp16`` or ``no``.
    """

    accelerator: Any
    environment: environment.RankEnvironment
    profile: ProfileKind
    precision: str

    @property
    def device(self) -> torch.device:
        """Where this rank computes; a GPU with its index."""
        device: torch.device = self.accelerator.device
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def configured_profile() -> dict[str, Any]:
    """What `accelerate launch` read from its config file, from the environment that it gave this process.

    Keys and values as an accelerate config file would say them; nothing is checked.
    """
    place = environment.rank_environment()
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": environment.get("ACCELERATE_MIXED_PRECISION") or "no",
        "num_processes": place.world_size,
    }
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        values = {key: _given(name) for key, name in _DEEPSPEED_VARIABLES.items()}
        return {
            **content,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {key: value for key, value in values.items() if value is not None},
        }
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        values = {key: _given(name) for key, name in _FSDP_VARIABLES.items()}
        return {
            **content,
            "distributed_type": "FSDP",
            "fsdp_config": {key: value for key, value in values.items() if value is not None},
        }
    return {**content, "distributed_type": "MULTI_GPU" if place.world_size > 1 else "NO"}


_DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
_FSDP_VARIABLES = {
    "fsdp_version": "FSDP_VERSION",
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "fsdp_offload_params": "FSDP_OFFLOAD_PARAMS",
    "fsdp_cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "fsdp_activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
}


def _given(variable: str) -> Any:
    """A variable's value with the type it has in a config file; None if accelerate had nothing to say."""
    text = environment.get(variable)
    if text is None or (text in ("none", "None") and not variable.endswith("_DEVICE")):
        return None
    return yaml.safe_load(text)


class NotJoined(AllranksError):
    """Another rank did not come."""

    exit_code = ExitCode.RANK_LOST


def join(profile: ProfileKind, precision: str, *, patience_s: float | None) -> tuple[Rank, ControlPlane]:
    """Meet the other ranks: the process groups, and the control plane over them.

    Args:
        profile: how the model is to be spread.
        precision: ``bf16``, ``fp16`` or ``no``.
        patience_s: how long to wait for a rank that does not come, but at least `LEAST_PATIENCE_S`; None: as long as
            for a collective.

    Raises:
        NotJoined: one did not come.
        UserError: the profile is for several ranks, and there is one.
    """
    patience = timedelta(seconds=DATA_PLANE_TIMEOUT_S if patience_s is None else max(LEAST_PATIENCE_S, patience_s))
    place = environment.rank_environment()
    began = time.monotonic()
    try:
        rank = _joined(profile, precision, patience)
        control = ControlPlane(rank=place.rank, world_size=place.world_size, join_timeout=patience)
    except RuntimeError as error:
        if time.monotonic() - began < 0.9 * patience.total_seconds():
            raise
        raise NotJoined(
            f"rank {place.rank} waited {human_seconds(patience.total_seconds())} for the others to join: one of "
            f"{place.world_size} is stopped, or still starting\n"
            "    fix: see which rank's log ends first; for a slow start, raise oom.hang_timeout_s"
        ) from error
    if place.world_size > 1:
        # Who is here may be slower than that.
        usual = timedelta(seconds=DATA_PLANE_TIMEOUT_S)
        dist.distributed_c10d._set_pg_timeout(usual, dist.group.WORLD)
        dist.distributed_c10d._get_default_store().set_timeout(usual)
    return rank, control


def _joined(profile: ProfileKind, precision: str, patience: timedelta) -> Rank:
    """Start the process groups through accelerate.

    Ranks on CPUs, and ranks that share a GPU (NCCL refuses two on one), talk over gloo.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    place = environment.rank_environment()
    cuda = torch.cuda.is_available()
    # DDP would broadcast buffers in every forward: a collective where there must be none.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    if place.world_size > 1:
        shared = cuda and place.local_world_size > torch.cuda.device_count()
        if shared:
            # Accelerate and DeepSpeed take the card of this number, and the second rank has none of its own.
            environment.put("LOCAL_RANK", str(place.local_rank % torch.cuda.device_count()))
        handlers.append(InitProcessGroupKwargs(backend="gloo" if shared or not cuda else "nccl", timeout=patience))
    elif profile != "single":
        raise UserError(
            f"profile {profile} runs on several ranks, and there is one\n    fix: --profile single, or --gpus 2"
        )
    if profile.startswith("zero") and not cuda:
        import deepspeed

        # Else DeepSpeed compiles it when it starts: that needs ninja and a C++ compiler, and a kill leaves a lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # With cpu=True accelerate ignores DeepSpeed; without it, it finds the CPU itself.
    cpu = not cuda and not profile.startswith("zero")
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=handlers)
    if accelerator.num_processes != place.world_size:
        raise RuntimeError(f"accelerate sees {accelerator.num_processes} ranks, torchrun started {place.world_size}")
    return Rank(accelerator=accelerator, environment=place, profile=profile, precision=precision)


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


def leave(control: ControlPlane) -> None:
    """Take the process groups down, when all ranks have agreed to go."""
    control.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
