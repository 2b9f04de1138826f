"""The worker from joining the others to the verdict."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost
from allranks.coordinator.attempt import FailureFlag
from allranks.coordinator.injection import FaultInjector
from allranks.coordinator.watcher import Declared, Watcher
from allranks.errors import ExitCode, StopTraining
from allranks.events import EventLog
from allranks.plan.plan import Plan
from allranks.train.console import Console
from allranks.train.context import Context
from allranks.train.finishing import finish
from allranks.train.loop import train
from allranks.train.process import Rank
from allranks.train.setup import first_caps, set_up
from allranks.train.versions import versions
from allranks.verdict import Verdict, write_verdict


def run(plan: Plan, rank: Rank, control: ControlPlane, launch: int) -> ExitCode:
    """Train as planned.

    Returns:
        The exit code on which all ranks agreed.

    Raises:
        ControlPlaneLost: a rank is gone; nothing was agreed.
    """
    ctx = _context(plan, rank, control, launch)
    _announce(ctx)
    try:
        job = set_up(ctx)
        train(ctx, job)
        finish(ctx, job)
        verdict = Verdict(
            reason="finished",
            message=f"{job.total_steps} steps; the adapter is in {ctx.run_dir / 'adapter'}",
            exit_code=ExitCode.OK,
            step=job.position.step,
        )
    except StopTraining as stop:
        verdict = _verdict(stop.reason, str(stop), stop.exit_code, ctx.committed_step)
        ctx.events.write("stop", step=ctx.committed_step, reason=stop.reason, message=str(stop))
    if ctx.is_main:
        write_verdict(ctx.run_dir, verdict)
        ctx.console.say(f"{verdict.reason}: {verdict.message}")
    ctx.control.exchange([])  # nobody leaves before the verdict is on the disk
    ctx.watcher.close()
    ctx.flag.close()
    ctx.events.close()
    return verdict.exit_code


def _context(plan: Plan, rank: Rank, control: ControlPlane, launch: int) -> Context:
    place = rank.environment
    run_dir = Path(plan.run_dir)
    console = Console(main=place.rank == 0)
    events = EventLog(run_dir, place.rank, launch)
    store: Any = dist.distributed_c10d._get_default_store() if place.world_size > 1 else None
    ctx = Context(
        plan=plan,
        run_dir=run_dir,
        rank=rank,
        launch=launch,
        control=control,
        flag=FailureFlag(world_size=place.world_size, store=store),
        watcher=Watcher(
            rank=place.rank,
            world_size=place.world_size,
            store=store,
            key=f"launch-{launch}",
            deadline_s=plan.config.oom.stop_timeout_s,
            leave=lambda declared: _leave(ctx, declared),
        ),
        injector=FaultInjector(plan.injections, rank=place.rank, device=str(rank.device)),
        events=events,
        console=console,
        policy=first_caps(plan.config),
    )

    def remember(number: int, _frame: FrameType | None) -> None:
        ctx.signalled.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    return ctx


def _announce(ctx: Context) -> None:
    if not ctx.is_main:
        return
    ctx.events.write(
        "launch",
        world_size=ctx.world_size,
        profile=ctx.rank.profile,
        device=ctx.rank.device.type,
        versions=versions(),
    )
    ctx.console.say(
        f"{ctx.plan.name}: {ctx.world_size} rank(s), profile {ctx.rank.profile}, {ctx.rank.device.type}, "
        f"compute {'fp32' if ctx.rank.precision == 'no' else ctx.rank.precision}"
    )
    for word in ctx.plan.notes:
        if ctx.rank.environment.under_launcher:  # which has said them
            ctx.events.write("note", message=word)
        else:
            ctx.note(word)


def _verdict(reason: str, message: str, exit_code: ExitCode, step: int) -> Verdict:
    return Verdict(reason=reason, message=message, exit_code=exit_code, step=step)  # type: ignore[arg-type]


def _leave(ctx: Context, declared: Declared) -> None:
    """In the watcher's thread, on every rank: the main thread may never come back from its collective."""
    stop = json.loads(declared.message)
    silent = f" (no answer from ranks {list(declared.silent_ranks)})" if declared.silent_ranks else ""
    verdict = _verdict(stop["reason"], stop["message"] + silent, ExitCode(stop["exit_code"]), ctx.committed_step)
    ctx.events.write("stop", step=ctx.committed_step, reason=verdict.reason, message=verdict.message)
    if ctx.is_main:
        write_verdict(ctx.run_dir, verdict)
        ctx.console.say(f"{verdict.reason}: {verdict.message}")
    sys.stdout.flush()
    os._exit(process_status(ctx.rank, verdict.exit_code))


def process_status(rank: Rank, code: ExitCode) -> int:
    """What this process returns: under our launcher 0, for torchelastic would restart the ranks for anything else."""
    return 0 if rank.environment.under_launcher else int(code)


def lost(error: ControlPlaneLost) -> NoReturn:
    """The end of a rank whose peers are gone: at once, for a data plane with a dead rank can't be taken down."""
    print(f"rank lost: {error}", file=sys.stderr, flush=True)
    os._exit(int(ExitCode.RANK_LOST))
