"""Every key of an accelerate config file: the values that allranks honours, and why it refuses the others.

The names are those of accelerate's `ClusterConfig` and of the options of `accelerate launch`; they are listed by
hand because accelerate can't be imported without torch. `accelerate config` writes many of them with values that
change nothing: those are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """What one key may say.

    Attributes:
        values: the only values that are honoured; empty where `test` decides.
        test: tells a valid value, where they can't be listed.
        takes: what `test` asks for, in words.
        why: what is wrong with any other value, and what to do instead.
    """

    values: tuple[Any, ...] = ()
    test: Callable[[Any], bool] | None = None
    takes: str = ""
    why: str

    def accepts(self, value: object) -> bool:
        """Whether `value` is honoured; 1 is not true, and 0 is not false."""
        if self.test is not None:
            return self.test(value)
        return any(type(value) is type(valid) and value == valid for valid in self.values)


def _only(*values: Any, why: str) -> KeyRule:
    return KeyRule(values=values, why=why)


def _positive_integer(value: object) -> bool:
    return type(value) is int and value >= 1


def _bound_on_the_norm(value: object) -> bool:
    return value == "auto" or (type(value) in (int, float) and float(str(value)) >= 0)


def _class_names(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)*", value) is not None


_ONE_MACHINE = "allranks runs on one machine for now; remove it"
_TPU = "it is for TPUs; remove it"
_OTHER_ENGINE = "allranks does not drive that engine; remove it"
_OBSOLETE = "FSDP2 has no such option and accelerate drops it; remove it"
_OFFLOAD = "offloading is not supported; the adapter's state is small, and 4-bit weights are; write none"

TOP_LEVEL: Mapping[str, KeyRule] = {
    "compute_environment": _only("LOCAL_MACHINE", why="allranks launches on this machine only"),
    "distributed_type": _only(
        "NO", "MULTI_GPU", "DEEPSPEED", "FSDP", why="allranks knows these four; put 'NO' in quotes"
    ),
    "mixed_precision": _only("no", "fp16", "bf16", why="allranks computes in these only; put 'no' in quotes"),
    "num_processes": KeyRule(test=_positive_integer, takes="an integer ≥ 1", why="write the number of ranks"),
    "num_machines": _only(1, why=_ONE_MACHINE),
    "machine_rank": _only(0, why=_ONE_MACHINE),
    "main_process_ip": _only(None, why=_ONE_MACHINE),
    "main_process_port": _only(None, why="allranks takes a free port at each launch; remove it"),
    "rdzv_backend": _only("static", "c10d", why="accelerate ignores it in a file, and allranks always uses c10d"),
    "same_network": _only(True, False, why="it is true or false"),
    "main_training_function": _only("main", why=_TPU),
    "gpu_ids": _only("all", None, why="choose the number with --gpus, and the cards with CUDA_VISIBLE_DEVICES"),
    "use_cpu": _only(False, why="CPU ranks are used where no GPU is visible; set CUDA_VISIBLE_DEVICES= to hide them"),
    "debug": _only(False, why="it checks collectives of accelerate that allranks does not use; remove it"),
    "enable_cpu_affinity": _only(False, why="accelerate ignores it in a file; remove it"),
    "downcast_bf16": _only(False, "no", why=_TPU),
    "tpu_name": _only(None, why=_TPU),
    "tpu_zone": _only(None, why=_TPU),
    "tpu_use_cluster": _only(False, why=_TPU),
    "tpu_use_sudo": _only(False, why=_TPU),
    "tpu_vm": _only(None, [], why=_TPU),
    "tpu_env": _only(None, [], why=_TPU),
    "command_file": _only(None, why=_TPU),
    "commands": _only(None, [], why=_TPU),
    "fp16": _only(why="accelerate replaced it by mixed_precision; write mixed_precision: fp16"),
    "dynamo_backend": _only("NO", why="compiled models are not supported; remove it"),
    "dynamo_config": _only(None, {}, why="compiled models are not supported; remove it"),
    "fp8_config": _only(None, {}, why="fp8 is not supported; remove it"),
    "parallelism_config": _only(None, {}, why=_OTHER_ENGINE),
    "megatron_lm_config": _only(None, {}, why=_OTHER_ENGINE),
    "mpirun_config": _only(None, {}, why=_OTHER_ENGINE),
}
"""Keys outside of `deepspeed_config` and `fsdp_config`."""

DEEPSPEED: Mapping[str, KeyRule] = {
    "zero_stage": _only(2, 3, why="stages 0 and 1 spread nothing that a LoRA run has much of; use ddp for them"),
    "gradient_accumulation_steps": _only(
        1, why="allranks drives the accumulation boundary itself; set training.gradient_accumulation_steps in the run"
    ),
    "gradient_clipping": KeyRule(
        test=_bound_on_the_norm, takes="a number ≥ 0 or auto", why="set training.max_grad_norm in the run"
    ),
    "offload_optimizer_device": _only("none", why=_OFFLOAD),
    "offload_param_device": _only("none", why=_OFFLOAD),
    "offload_optimizer_nvme_path": _only("none", None, why=_OFFLOAD),
    "offload_param_nvme_path": _only("none", None, why=_OFFLOAD),
    "zero3_init_flag": _only(
        False, "false", why="a 4-bit base can't be built in pieces: every rank loads it, then it is spread; write false"
    ),
    "zero3_save_16bit_model": _only(
        False, "false", why="allranks saves the adapter and never the base model; write false"
    ),
    "deepspeed_config_file": _only(
        None, why="its values would reach DeepSpeed unchecked; write the keys into the profile"
    ),
    "deepspeed_multinode_launcher": _only("standard", why="allranks launches with accelerate's standard launcher"),
    "deepspeed_hostfile": _only(None, why=_ONE_MACHINE),
    "deepspeed_exclusion_filter": _only(None, why=_ONE_MACHINE),
    "deepspeed_inclusion_filter": _only(None, why=_ONE_MACHINE),
    "deepspeed_moe_layer_cls_names": _only(
        None, why="leaf modules of mixtures of experts are not supported; remove it"
    ),
}
"""Keys of `deepspeed_config`."""

FSDP: Mapping[str, KeyRule] = {
    "fsdp_version": _only(2, why="version 1 can't shard frozen 4-bit weights beside a trained adapter; write 2"),
    "fsdp_auto_wrap_policy": _only(
        "TRANSFORMER_BASED_WRAP", why="without explicit layer classes a PEFT model becomes one unit, gathered whole"
    ),
    "fsdp_transformer_layer_cls_to_wrap": KeyRule(
        test=_class_names,
        takes="class names with commas and no spaces between them",
        why="name the decoder layer of the model, for example LlamaDecoderLayer",
    ),
    "fsdp_reshard_after_forward": _only(True, False, why="FSDP2 takes true or false, not FSDP1's strategies"),
    "fsdp_offload_params": _only(False, why="offloading is not supported; write false"),
    "fsdp_cpu_ram_efficient_loading": _only(
        False, why="transformers can't load a quantised base on one rank only; write false"
    ),
    "fsdp_activation_checkpointing": _only(
        False, why="recomputation is the run's: set training.gradient_checkpointing: true there, and write false here"
    ),
    "fsdp_activation_checkpointing_offload": _only(False, why="offloading is not supported; write false"),
    "fsdp_state_dict_type": _only(
        "FULL_STATE_DICT", why="allranks writes its own checkpoints, whole and by parameter name, on any profile"
    ),
    "fsdp_ignored_modules": _only(None, why="modules that are left out would stay whole on every rank; remove it"),
    "fsdp_sharding_strategy": _only("FULL_SHARD", why=_OBSOLETE),
    "fsdp_backward_prefetch": _only(None, "NO_PREFETCH", why=_OBSOLETE),
    "fsdp_forward_prefetch": _only(False, why=_OBSOLETE),
    "fsdp_use_orig_params": _only(True, why=_OBSOLETE),
    "fsdp_sync_module_states": _only(True, why=_OBSOLETE),
    "fsdp_min_num_params": _only(why="it belongs to SIZE_BASED_WRAP; remove it"),
}
"""Keys of `fsdp_config`."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "deepspeed_config": ("zero_stage", "zero3_init_flag"),
    "fsdp_config": (
        "fsdp_version",
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_cpu_ram_efficient_loading",
    ),
}
"""Keys that accelerate fills with a value which allranks refuses, if they are left out."""
