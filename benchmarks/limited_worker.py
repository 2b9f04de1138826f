"""The real worker on a card made smaller, with a stopwatch: for benchmarks/gpu_one_card.py.

The environment variable ALLRANKS_BENCH holds a JSON object:
  limit_bytes: torch's allocator may take no more than this (set after loading; context and NCCL lie outside it).
  peaks: path; each rank appends what each micro-step reserved at most, in forward and until the end of backward.
  logits: path; rank 0 writes the logits of a fixed probe before the first step.
  failures: path; each rank appends the moment at which an exception left its part of an attempt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch


def _append(path: str, **fields: Any) -> None:
    with open(f"{path}.rank{os.environ.get('RANK', '0')}", "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def _watch_peaks(path: str) -> None:
    from allranks.train import step

    plain = step._micro_step

    def watched(ctx: Any, job: Any, batch: Any, weights: Any, at: Any) -> Any:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        forward_bytes = []
        backward = job.strategy.backward

        def noted(loss: Any) -> None:
            forward_bytes.append(torch.cuda.max_memory_reserved())
            backward(loss)

        job.strategy.backward = noted
        try:
            return plain(ctx, job, batch, weights, at)
        finally:
            del job.strategy.backward
            shape = list(batch["input_ids"].shape)
            peak = torch.cuda.max_memory_reserved()
            _append(path, step=at.key.step, shape=shape, forward_bytes=forward_bytes[0], backward_bytes=peak)

    step._micro_step = watched


def _before_training(wanted: dict[str, Any]) -> None:
    from allranks.train import main as worker_main

    plain = worker_main.train

    def watched(ctx: Any, job: Any) -> None:
        if "logits" in wanted:
            from safetensors.torch import save_file

            ids = torch.arange(64, device=ctx.rank.device)[None] % 200
            job.strategy.train_mode(False)
            with torch.no_grad():
                logits = job.strategy.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            if ctx.is_main:
                save_file({"logits": logits.float().cpu().contiguous()}, wanted["logits"])
        if wanted.get("limit_bytes") is not None:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(ctx.rank.device).total_memory
            torch.cuda.set_per_process_memory_fraction(wanted["limit_bytes"] / total, ctx.rank.device)
        plain(ctx, job)

    worker_main.train = watched


def _watch_failures(path: str) -> None:
    from allranks.train import together

    plain = together.print_traceback

    def noted(error: BaseException) -> None:
        _append(path, time=time.time(), error=str(error).splitlines()[0][:200])
        plain(error)

    together.print_traceback = noted


def main() -> int:
    """Run one rank."""
    wanted = json.loads(os.environ["ALLRANKS_BENCH"])
    if "peaks" in wanted:
        _watch_peaks(wanted["peaks"])
    if "failures" in wanted:
        _watch_failures(wanted["failures"])
    _before_training(wanted)
    from allranks.train.__main__ import main as worker

    return worker(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
