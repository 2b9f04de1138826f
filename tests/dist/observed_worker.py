"""The real worker, watched or spoilt from outside, for tests of what must not go unnoticed.

The environment variable ALLRANKS_TEST_OBSERVE holds a JSON object:
  gradients: path; rank 0 writes the first step's reduced gradients there (safetensors).
  drop: true; one sample of each global batch is left out by the rank that has it, and not counted.
  twice: true; one sample of each global batch is taken twice by the rank that has it, and counted once.
"""

from __future__ import annotations

import json
import os
import sys
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
    """Change the samples of the last micro-batch behind the back of the counting."""
    from allranks.train import step

    plain = step.pad_batch

    def spoilt(samples: list[Any], pad_token_id: int) -> Any:
        batch = plain(samples, pad_token_id)
        if len(samples) > 1:
            if change == "drop":
                batch["labels"][0] = -100
            else:
                batch = {name: tensor.clone() for name, tensor in batch.items()}
                for tensor in batch.values():
                    tensor[0] = tensor[1]
        return batch

    step.pad_batch = spoilt


def main() -> int:
    wanted = json.loads(os.environ["ALLRANKS_TEST_OBSERVE"])
    if "gradients" in wanted:
        _watch_gradients(wanted["gradients"])
    for change in ("drop", "twice"):
        if wanted.get(change):
            _spoil(change)
    from allranks.train.__main__ import main as worker

    return worker(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
