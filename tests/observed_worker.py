"""The real worker, watched or spoilt from outside, for tests of what must not go unnoticed.

The environment variable ALLRANKS_TEST_OBSERVE holds a JSON object:
  gradients: path; rank 0 writes the first step's reduced gradients there (safetensors).
  drop: true; one sample of each global batch is left out by the rank that has it, and not counted.
  twice: true; one sample of each global batch is taken twice by the rank that has it, and counted once.
  sharding: path; rank 0 writes what FSDP made of the model, and what a forward pass leaves of it (JSON).
  logits: path; rank 0 writes there what the trained model makes of the first training sample (safetensors).
  slow: object with ``rank`` and ``seconds``; each call of a module takes that rank so much longer.
  loss_scale: the scale that fp16 starts with.
  crowd_bytes: the GPU can give so much beside the model, and before each micro-batch torch's cache holds all of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _watch_gradients(path: str) -> None:
    from safetensors.torch import save_file

    from allranks.train import loop

    plain = loop._optimizer_step

    def watched(ctx: Any, job: Any, reduced: Any, rate: float) -> None:
        if job.position.step == 0:
            gradients = job.strategy.gradients()
            if ctx.is_main:
                save_file(gradients, path)
        plain(ctx, job, reduced, rate)

    loop._optimizer_step = watched


def _spoil(change: str) -> None:
    """Change the samples of each micro-batch behind the back of the counting."""
    from allranks.data import collate

    plain = collate.pad_batch

    def spoilt(samples: list[Any], *rest: Any, **options: Any) -> Any:
        batch = plain(samples, *rest, **options)
        if len(samples) > 1:
            if change == "drop":
                batch["labels"][0] = -100
            else:
                for tensor in batch.values():
                    tensor[0] = tensor[1].clone()
        return batch

    collate.pad_batch = spoilt


def _watch_sharding(path: str) -> None:
    """By layer class, whether each FSDP unit is spread before a forward pass, and again after it."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from allranks.train import setup

    plain = setup.weights_seen_in_forward

    def spread(model: Any) -> dict[str, list[bool]]:
        units: dict[str, list[bool]] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                own = [p for inner in module.modules() for p in inner.parameters(recurse=False)]
                name = type(module).__name__.removeprefix("FSDP")
                units.setdefault(name, []).append(all(isinstance(p, DTensor) for p in own))
        return units

    def watched(strategy: Any, model: Any, device: Any) -> Any:
        before = spread(model)
        seen = plain(strategy, model, device)
        if os.environ["RANK"] == "0":
            Path(path).write_text(json.dumps({"before": before, "after": spread(model)}), encoding="utf-8")
        return seen

    setup.weights_seen_in_forward = watched


def _keep_logits(path: str) -> None:
    """The batch by which the worker proves its adapter, and the logits of the model in memory for it."""
    from safetensors.torch import save_file

    from allranks.train import finishing

    plain = finishing._logits

    def kept(job: Any, probe: Any) -> Any:
        logits = plain(job, probe)
        if os.environ["RANK"] == "0":
            save_file({**probe, "logits": logits}, path)
        return logits

    finishing._logits = kept


def _slow_down(seconds: float) -> None:
    """Each module of the model takes so much longer: a rank that gets on, but slowly."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    register_module_forward_pre_hook(lambda _module, _inputs: time.sleep(seconds))


def _crowd(spare_bytes: int) -> None:
    """What a micro-batch needs must be freed from the cache first, which the allocator counts as a retry."""
    import torch

    from allranks.train import step

    plain = step._micro_step
    block_bytes = 10 * 2**20  # the smallest request that the allocator gives a segment of just its size
    limits: list[int] = []

    def crowded(ctx: Any, *rest: Any) -> Any:
        device = ctx.rank.device
        torch.cuda.empty_cache()
        if not limits:
            limits.append(torch.cuda.memory_reserved(device) + spare_bytes)
            torch.cuda.set_per_process_memory_fraction(limits[0] / torch.cuda.mem_get_info(device)[1], device)
        blocks, left = divmod(limits[0] - torch.cuda.memory_reserved(device), block_bytes)
        sizes = [block_bytes] * (blocks - 1) + [block_bytes + left - left % 2**21]
        filling = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del filling
        return plain(ctx, *rest)

    step._micro_step = crowded


def main() -> None:
    wanted = json.loads(os.environ["ALLRANKS_TEST_OBSERVE"])
    if "gradients" in wanted:
        _watch_gradients(wanted["gradients"])
    if "sharding" in wanted:
        _watch_sharding(wanted["sharding"])
    if "logits" in wanted:
        _keep_logits(wanted["logits"])
    if "slow" in wanted and os.environ["RANK"] == str(wanted["slow"]["rank"]):
        _slow_down(wanted["slow"]["seconds"])
    if "loss_scale" in wanted:
        from allranks.train import scaler

        scaler.INITIAL_SCALE = wanted["loss_scale"]
    if "crowd_bytes" in wanted:
        _crowd(wanted["crowd_bytes"])
    for change in ("drop", "twice"):
        if wanted.get(change):
            _spoil(change)
    from allranks.train.__main__ import main as worker

    worker(sys.argv[1:])


if __name__ == "__main__":
    main()
