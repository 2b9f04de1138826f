"""How a global batch is split over ranks: against transformers' `batch_rebalance`, on the same global batches.

    python benchmarks/batch_split.py --out benchmarks/results

Needs no GPU: it counts padding, the largest micro-batch and the modelled time of the slowest rank. transformers splits
by samples, ours by tokens, so ours is given as its token cap the largest micro-batch that transformers made: the same
memory. Each is told the cost that counts, as far as it can be told: transformers has one of its own built in, so the
table is made under that one too. Also: how long it takes to plan an epoch of a million samples on one core.
Prints one JSON object, and writes it with the command and the versions to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from allranks.batches.fit import work_of
from allranks.batches.order import SampleOrder
from allranks.batches.split import Cost, split
from allranks.caps import Caps
from allranks.train.versions import versions

MIXES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "t0": lambda random, n: np.clip(random.lognormal(5.02, 1.03, n), 8, 2048),
    "chat": lambda random, n: np.clip(random.lognormal(6.91, 0.81, n), 8, 8192),
    "bimodal": lambda random, n: np.where(
        random.random(n) < 0.8, random.integers(20, 200, n), random.integers(1500, 2048, n)
    ),
    "heavy tail": lambda random, n: np.clip(random.lognormal(5.5, 1.6, n), 8, 16384),
}
"""Lengths in tokens; the first two are those of the throughput benchmarks."""

COSTS = {
    "Llama-3-8B": Cost(a=1.0, b=1.0 / (6 * 4096), c=4096.0),
    "transformers": Cost(a=1.0, b=BatchRebalanceSampler.QUADRATIC_COST_COEF, c=0.0),
}
SAMPLES_A_RANK = 64
PER_DEVICE = (8, 16, 32)
MicroBatches = Sequence[Sequence[Sequence[int]]]
"""Per rank, the lengths of the samples of each of its micro-batches."""


def rebalanced(lengths: list[int], world: int, per_device: int) -> MicroBatches:
    """One global batch as transformers splits it."""
    slots = SAMPLES_A_RANK // per_device
    sampler = BatchRebalanceSampler(lengths, len(lengths), world, slots, shuffle=False)
    ranks = sampler._assign(range(len(lengths)), lengths)
    return [[[lengths[i] for i in micro] for micro in rank] for rank in ranks]


def ours(lengths: list[int], world: int, max_tokens: int, *, cost: Cost, padded: bool, lockstep: bool) -> MicroBatches:
    """One global batch as allranks splits it."""
    caps = Caps(max_samples=len(lengths), max_tokens=max_tokens)
    ranks = split(lengths, world_size=world, caps=caps, lockstep=lockstep, cost=cost, padded=padded)
    return [[[lengths[i] for i in micro] for micro in rank] for rank in ranks]


def measures(batches: list[MicroBatches], costs: dict[str, Cost], *, padded: bool) -> dict[str, Any]:
    """Padding in percent of what is computed, tokens of the largest micro-batch, modelled time per step."""

    works = [[[work_of(micro, padded=padded) for micro in rank] for rank in ranks] for ranks in batches]
    sizes = [work.tokens for ranks in works for rank in ranks for work in rank]
    real, computed = sum(sum(micro) for ranks in batches for rank in ranks for micro in rank), sum(sizes)
    told: dict[str, Any] = {
        "padding_percent": round(100 * (1 - real / computed), 2),
        "largest_micro_batch_tokens": max(sizes),
        "micro_steps": round(statistics.fmean(max(map(len, ranks)) for ranks in batches), 2),
    }
    for name, cost in costs.items():
        free = [max(sum(work.cost(cost) for work in rank) for rank in ranks) for ranks in works]
        told[f"time_{name}"] = round(statistics.fmean(free))
    return told


def compared(mix: str, world: int, per_device: int, steps: int) -> dict[str, Any]:
    """One row: the same global batches by both."""
    random = np.random.default_rng(0)
    n = SAMPLES_A_RANK * world
    lengths = [MIXES[mix](random, n).astype(int).tolist() for _ in range(steps)]
    began = time.process_time()
    theirs = [rebalanced(batch, world, per_device) for batch in lengths]
    their_ms = 1e3 * (time.process_time() - began) / steps
    peer = measures(theirs, COSTS, padded=True)
    cap = peer["largest_micro_batch_tokens"]
    row = {"mix": mix, "ranks": world, "per_device": per_device, "steps": steps}
    row["transformers"] = {**peer, "planning_ms": round(their_ms, 2)}
    for kind, padded in (("padded", True), ("flat", False)):
        for name, cost in COSTS.items():
            began = time.process_time()
            mine = [ours(batch, world, cap, cost=cost, padded=padded, lockstep=False) for batch in lengths]
            ms = 1e3 * (time.process_time() - began) / steps
            row[f"{kind}_for_{name}"] = {
                **measures(mine, {name: cost}, padded=padded),
                "planning_ms": round(ms, 2),
            }
    return row


def epoch_seconds(samples: int, global_batch: int, world: int) -> dict[str, Any]:
    """Order and all splits of one epoch, on one core."""
    lengths = MIXES["t0"](np.random.default_rng(1), samples).astype(int)
    began = time.process_time()
    order = SampleOrder(
        n_samples=samples, lengths=lengths, seed=1, fingerprint="benchmark", global_batch_size=global_batch
    )
    caps = Caps(max_samples=global_batch, max_tokens=16384)
    each = []
    for consumed in range(0, samples, global_batch):
        ids = list(order.batch(0, consumed))
        start = time.process_time()
        split(lengths[ids].tolist(), world_size=world, caps=caps, lockstep=False, padded=False)
        each.append(time.process_time() - start)
    return {
        "samples": samples,
        "global_batch": global_batch,
        "ranks": world,
        "seconds": round(time.process_time() - began, 2),
        "median_split_ms": round(1e3 * statistics.median(each), 3),
    }


def main() -> None:
    """Compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(MIXES), help="some of: %(default)s")
    parser.add_argument("--worlds", default="2,8,64", help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=20, help="global batches per row")
    parser.add_argument("--epoch", type=int, default=1_000_000, help="samples of the epoch that is planned")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for mix in arguments.mixes.split(","):
        for world in map(int, arguments.worlds.split(",")):
            for per_device in PER_DEVICE:
                rows.append(compared(mix, world, per_device, max(2, arguments.steps // world)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": "python " + " ".join(sys.argv),
        "versions": versions(),
        "rows": rows,
        "epoch": epoch_seconds(arguments.epoch, 512, 64),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "batch-split.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["epoch"]))


if __name__ == "__main__":
    main()
