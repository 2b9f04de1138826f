"""`zero2` and `zero3`: DeepSpeed's engine, driven so that the gradients are reduced once a step.

The engine keeps the adapter in fp32 and computes under torch autocast (its `torch_autocast` section), so
gradients accumulate and travel in fp32. It is driven directly: `accelerator.backward` would call `engine.step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from allranks.strategies.base import Keep, NamedTensors, OptimizerState, on_cpu
from allranks.strategies.optim import allocate_state, set_learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


def configure_engine(config: dict[str, Any], *, trainable: int) -> None:
    """Complete DeepSpeed's configuration in place.

    Args:
        config: the plugin's `deepspeed_config`, with the profile's values and accelerate's precision in it.
        trainable: number of trained parameters. DeepSpeed's default buckets are 5e8 elements (2 GB) whatever
            their number.
    """
    dtype = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)
    config.update(
        {
            "train_micro_batch_size_per_gpu": 1,  # never read: the loop forms the batches
            "gradient_clipping": 0.0,  # the loop clips, with the norm that all ranks voted on
            "steps_per_print": math.inf,
            "bf16": {"enabled": False},
            "fp16": {"enabled": False},
            "torch_autocast": {
                "enabled": dtype is not None,
                "dtype": {"bf16": "bfloat16", "fp16": "float16", None: "float32"}[dtype],
                # Parameters of the modules named here would travel in the low precision.
                "lower_precision_safe_modules": [],
            },
        }
    )
    config["zero_optimization"].update(
        {"reduce_bucket_size": trainable, "allgather_bucket_size": trainable, "overlap_comm": False}
    )


class Zero:
    """Strategy of the `zero2` and `zero3` profiles. Arguments as `Replicated`'s."""

    gathers = True

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._world_size: int = accelerator.num_processes
        self._rank: int = accelerator.process_index
        plugin = accelerator.state.deepspeed_plugin
        self._stage: int = plugin.zero_stage
        self.lockstep = self._stage == 3
        self.whole_base = self._stage == 2
        configure_engine(plugin.deepspeed_config, trainable=sum(p.numel() for p in self._named.values()))
        self._engine, _ = accelerator.prepare(model, optimizer)
        self._zero = self._engine.optimizer
        found = self._engine.zero_optimization_stage()
        if found != self._stage or self._engine.dp_world_size != self._world_size:
            raise RuntimeError(
                f"DeepSpeed runs stage {found} on {self._engine.dp_world_size} ranks, "
                f"not stage {self._stage} on {self._world_size}"
            )
        self._zero.torch_autocast_gradscaler = None  # fp16: the loop scales the loss, and once is enough
        if self._stage == 2:
            self._zero.compute_grad_norm = False  # `reduce` computed it; once more would be one more collective
        self._base = self._zero.optimizer
        allocate_state(self._base, self._masters())
        if self._stage == 2:
            self._zero._lazy_init_hp_params_optimizer_state()
        self.begin_step()

    def _masters(self) -> list[torch.nn.Parameter]:
        """This rank's flat fp32 partitions, which the wrapped optimizer updates."""
        masters = self._zero.fp32_partitioned_groups_flat if self._stage == 3 else None
        return list(masters if masters is not None else self._zero.single_partition_of_fp32_groups)

    def forward(self, inputs: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        logits: torch.Tensor = self._engine(**inputs).logits
        return logits

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over the ranks; times the world size is the sum.
        self._engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def begin_step(self) -> None:
        # What DeepSpeed's `coalesce_grad_reduction` does on entry. The context manager itself is of no use:
        # it reduces on the way out even when an exception is on its way.
        self._engine.inside_no_sync_ctxt = True
        self._zero._coalesce_grad_reduction = True
        # A backward that was broken off leaves its depth behind.
        self._zero._backward_active_depth = 0
        self._zero._backward_hook_state.reset_for_new_step()
        for p in self._named.values():
            p.grad = None

    def reserve(self) -> None:
        # A rank without samples, or a module that no sample reached: its gradient is zero, and it is reduced.
        for p in self._named.values():
            if p.grad is None:
                shape = getattr(p, "ds_shape", p.shape)  # ZeRO-3 keeps the whole shape beside its partition
                p.grad = torch.zeros(shape, dtype=torch.float32, device=self._engine.device)
        if self._stage == 2:
            self._zero.setup_buckets()

    def reduce(self) -> float:
        # What `coalesce_grad_reduction` does on exit.
        self._zero._coalesce_grad_reduction = False
        self._engine.inside_no_sync_ctxt = False
        self._engine.set_gradient_accumulation_boundary(True)
        if self._stage == 3:
            self._engine._flush_coalesced_reduction_zero3(self._zero)
            norms = self._zero._get_norm_groups()
            return float(torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])))
        self._engine._flush_coalesced_reduction_zero12(self._zero)
        return float(self._zero.scaled_global_norm())

    def step(self, learning_rate: float, coefficient: float) -> None:
        if coefficient != 1.0:
            for group in self._zero.averaged_gradients.values():
                for gradient in group or ():
                    gradient.mul_(coefficient)
        set_learning_rate(self._base, learning_rate)
        self._engine.step()

    def train_mode(self, training: bool) -> None:
        self._engine.train(training)

    def trainable(self, keep: Keep = on_cpu) -> NamedTensors:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: keep(safe_get_full_fp32_param(p)) for name, p in self._named.items()}

    def load_trainable(self, tensors: NamedTensors) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for name, p in self._named.items():
            if self._stage == 3:
                safe_set_local_fp32_param(p, self._own_part(p, tensors[name]))
            else:
                safe_set_full_fp32_param(p, tensors[name].to(self._engine.device))
        self._publish_masters(tensors)

    def _own_part(self, p: Any, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of `tensor` under ZeRO-3, flat, padded with zeros as the last ones are.

        DeepSpeed's functions for whole tensors don't know of the padding: they fail where the ranks don't divide them.
        """
        size = p.ds_tensor.numel()
        whole = torch.zeros(size * self._world_size, dtype=tensor.dtype, device=self._engine.device)
        whole[: tensor.numel()] = tensor.flatten()
        return whole[size * self._rank : size * (self._rank + 1)]

    def _publish_masters(self, tensors: NamedTensors) -> None:
        """The copies that forward reads: under ZeRO-2 they are not the masters, under ZeRO-3 they are gathered."""
        if self._stage == 2:
            with torch.no_grad():
                for name, p in self._named.items():
                    p.copy_(tensors[name])
            return
        import deepspeed

        for name, p in self._named.items():
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                p.copy_(tensors[name])

    def gradients(self) -> NamedTensors:
        from deepspeed.utils import safe_get_full_grad

        return {name: on_cpu(safe_get_full_grad(p)) for name, p in self._named.items()}

    def optimizer_state(self, keep: Keep = on_cpu) -> OptimizerState:
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._base.state[self._masters()[0]]["step"]
        return {
            name: {"step": keep(step), **{key: keep(safe_get_full_optimizer_state(p, key)) for key in _MOMENTS}}
            for name, p in self._named.items()
        }

    def load_optimizer_state(self, state: OptimizerState) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for name, p in self._named.items():
            for key in _MOMENTS:
                if self._stage == 3:
                    safe_set_local_optimizer_state(p, self._own_part(p, state[name][key]), key)
                else:
                    safe_set_full_optimizer_state(p, state[name][key].to(self._engine.device), key)
        step = next(iter(state.values()))["step"]
        for master in self._masters():
            self._base.state[master]["step"].copy_(step)
