"""The real worker on a card that becomes too small, with a stopwatch: for benchmarks/gpu_one_card.py.

The environment variable ALLRANKS_BENCH holds a JSON object:
  squeeze: list of phases, ``forward`` or ``backward``. Each time a micro-batch with a long sample comes up, the
    rank that has it lowers torch's memory fraction so far that the next phase of the list can't finish with it: to
    three quarters of what forward needs, or to a little above what is allocated when backward begins. What each
    phase needs per token is measured in the micro-steps before. The limit stays.
  wide_tokens: a micro-batch at least this wide has a long sample.
  logits: path; rank 0 writes the logits of a fixed probe before the first step.
  moments: path; each rank appends the moment at which an exception left its part of an attempt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


def _append(path: str, **fields: Any) -> None:
    with Path(f"{path}.rank{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


class Squeeze:
    """Wraps the worker's micro-step on one rank."""

    def __init__(self, wanted: dict[str, Any], plain: Any) -> None:
        self.phases: list[str] = list(wanted["squeeze"])
        self.wide_tokens: int = wanted["wide_tokens"]
        self.moments: str = wanted["moments"]
        self.plain = plain
        self.forward_bytes_per_token = 0.0
        self.backward_bytes_per_token = 0.0

    def __call__(self, ctx: Any, job: Any, batch: Any, weights: Any, at: Any) -> Any:
        samples, width = batch["input_ids"].shape
        tokens = samples * width
        wide = width >= self.wide_tokens and samples > 1 and at.key.attempt == 0
        # Only after a step has shown what a token needs; all ranks count the phases in the same steps.
        phase = self.phases.pop(0) if wide and self.phases and self.forward_bytes_per_token else None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if phase == "forward":
            self.limit(ctx, phase, torch.cuda.memory_reserved() + 0.75 * self.forward_bytes_per_token * tokens)
        backward = job.strategy.backward
        entered: list[int] = []

        def watched(loss: Any) -> None:
            entered.append(torch.cuda.memory_allocated())
            need = (torch.cuda.max_memory_allocated() - before) / tokens
            self.forward_bytes_per_token = max(self.forward_bytes_per_token, need)
            torch.cuda.reset_peak_memory_stats()
            if phase == "backward":
                torch.cuda.empty_cache()
                slack = 0.15 * self.backward_bytes_per_token * tokens
                self.limit(ctx, phase, torch.cuda.memory_reserved() + slack)
            backward(loss)

        job.strategy.backward = watched
        try:
            loss = self.plain(ctx, job, batch, weights, at)
        finally:
            del job.strategy.backward
        need = (torch.cuda.max_memory_allocated() - entered[0]) / tokens
        self.backward_bytes_per_token = max(self.backward_bytes_per_token, need)
        return loss

    def limit(self, ctx: Any, phase: str, limit_bytes: float) -> None:
        """From now on torch's allocator may take no more than this."""
        total = torch.cuda.get_device_properties(ctx.rank.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total, ctx.rank.device)
        _append(self.moments, squeezed=phase, limit_bytes=int(limit_bytes), time=time.time())


def _write_logits(path: str) -> None:
    from safetensors.torch import save_file

    from allranks.train import main as worker_main

    plain = worker_main.train

    def watched(ctx: Any, job: Any) -> None:
        ids = torch.arange(64, device=ctx.rank.device)[None] % 200
        job.strategy.train_mode(False)
        with torch.no_grad():
            logits = job.strategy.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if ctx.is_main:
            save_file({"logits": logits.float().cpu().contiguous()}, path)
        plain(ctx, job)

    worker_main.train = watched


def main() -> None:
    """Run one rank."""
    from allranks.train import step, together
    from allranks.train.__main__ import main as worker

    wanted = json.loads(os.environ["ALLRANKS_BENCH"])
    step._micro_step = Squeeze(wanted, step._micro_step)
    plain = together.print_traceback

    def noted(error: BaseException) -> None:
        _append(wanted["moments"], time=time.time(), error=f"{type(error).__name__}: {error}"[:200])
        plain(error)

    together.print_traceback = noted
    if "logits" in wanted:
        _write_logits(wanted["logits"])
    worker(sys.argv[1:])


if __name__ == "__main__":
    main()
