"""One rank under liveness with a real store and real gloo groups, and one behaviour by name.

Run as ``liveness_stand_in.py FOLDER RANK WORLD_SIZE PORT HANG_TIMEOUT_S BEHAVIOUR``, or call `enter` in a process of
its own. Whoever is told of a hang writes it to ``hung{rank}.json`` and leaves with `HUNG_STATUS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost
from allranks.coordinator.heartbeats import Hung, Pulse
from allranks.coordinator.liveness import Liveness

HUNG_STATUS = 7


@dataclass(kw_only=True)
class Here:
    """One rank.

    Attributes:
        folder: where it leaves what it has to say.
    """

    folder: Path
    rank: int
    world_size: int
    control: ControlPlane
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def last(self) -> bool:
        return self.rank == self.world_size - 1

    def mark(self, name: str) -> None:
        (self.folder / f"{name}{self.rank}").write_text(repr(time.time()))

    def vote(self, number: float = 0.0) -> list[list[float]]:
        with self.pulse.waiting("vote 1"):
            return self.control.exchange([number])

    def sleep_for_ever(self) -> None:
        self.mark("stuck")
        time.sleep(3600)


def one_sleeps(here: Here) -> None:
    """The last rank never comes to the vote."""
    here.pulse.beat("forward", 7, 2)
    if here.last:
        here.sleep_for_ever()
    here.vote()


def steps(here: Here) -> None:
    """Small steps of a real model, a beat and a vote for each, until rank 0 finds the file ``enough``."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(64)))
    step, slowest_s = 0, 0.0
    while True:
        step += 1
        began = time.monotonic()
        here.pulse.beat("forward", step)
        for _ in range(30):
            layers(torch.ones(64, 256)).sum().backward()
        slowest_s = max(slowest_s, time.monotonic() - began)
        rows = here.vote(float((here.folder / "enough").exists()))
        (here.folder / f"steps{here.rank}").write_text(json.dumps({"steps": step, "slowest_s": slowest_s}))
        if step == 1:
            here.mark("ready")
        if rows[0][0]:
            return


def rank_0_computes(here: Here) -> None:
    """Rank 0 computes without a beat until it finds the file ``enough``; the others wait for it in a vote."""
    here.pulse.beat("data", 1)
    here.mark("ready")
    while here.rank == 0 and not (here.folder / "enough").exists():
        for _ in range(1000):
            sorted(range(1000), key=lambda number: -number)
    here.vote()


def endless_collective(*, marked: bool) -> Callable[[Here], None]:
    """A collective of the data plane that the last rank never enters; the others may say that they wait in it."""

    def work(here: Here) -> None:
        here.pulse.beat("backward", 3)
        if here.last:
            here.sleep_for_ever()
        with here.pulse.waiting("a collective") if marked else nullcontext():
            dist.all_reduce(torch.ones(4))

    return work


def crossed_waits(here: Here) -> None:
    """The ranks wait in collectives of different groups: none of them ends."""
    with here.pulse.waiting("a collective"):
        if here.last:
            here.mark("stuck")
            here.control.exchange([])
        else:
            dist.all_reduce(torch.ones(4))


BEHAVIOURS: dict[str, Callable[[Here], None]] = {
    "one_sleeps": one_sleeps,
    "steps": steps,
    "rank_0_computes": rank_0_computes,
    "endless_collective": endless_collective(marked=False),
    "endless_collective_marked": endless_collective(marked=True),
    "crossed_waits": crossed_waits,
}


def enter(folder: Path, rank: int, world_size: int, port: int, hang_timeout_s: float, behaviour: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=120)),
        rank=rank,
        world_size=world_size,
    )
    here = Here(folder=folder, rank=rank, world_size=world_size, control=ControlPlane(rank=rank, world_size=world_size))

    def leave(hung: Hung) -> None:
        killed = liveness.kill_not_answering(hung)
        told = asdict(hung) | {"culprits": hung.culprits, "message": hung.message, "killed": killed, "at": time.time()}
        (folder / f"hung{rank}.json").write_text(json.dumps(told, default=str))
        os._exit(HUNG_STATUS)

    liveness = Liveness(
        rank=rank,
        world_size=world_size,
        store=dist.distributed_c10d._get_default_store(),
        key="launch-1/generation-0",
        pulse=here.pulse,
        hang_timeout_s=hang_timeout_s,
        stacks_dir=folder / "stacks",
        on_hang=leave,
    )
    try:
        BEHAVIOURS[behaviour](here)
    except (RuntimeError, ControlPlaneLost):
        liveness.give_way()
        raise
    liveness.close()
    here.control.exchange([])
    here.control.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    enter(Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5]), sys.argv[6])
