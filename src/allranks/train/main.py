"""The worker from joining the others to the verdict."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost
from allranks.coordinator.attempt import FailureFlag
from allranks.coordinator.heartbeats import Pulse
from allranks.coordinator.injection import FaultInjector
from allranks.coordinator.liveness import Liveness
from allranks.coordinator.progress import ProgressPage
from allranks.coordinator.watcher import Watcher
from allranks.errors import ExitCode, StopTraining
from allranks.events import EventLog
from allranks.plan.plan import Plan
from allranks.rundir import injected_dir
from allranks.train.console import Console
from allranks.train.context import Context
from allranks.train.finishing import finish
from allranks.train.leaving import (
    leave_as_declared,
    leave_for_peers,
    leave_hung,
    let_a_save_end,
    start_again,
    tell_verdict,
    verdict_of,
)
from allranks.train.loop import train
from allranks.train.memory import MemoryMeter
from allranks.train.process import Rank
from allranks.train.respawning import agreed_generation, revive
from allranks.train.setup import first_caps, set_up
from allranks.train.signals import listen
from allranks.train.snapshot import FirstOom
from allranks.train.stopwatch import Stopwatch
from allranks.train.together import RespawnNow
from allranks.train.versions import versions
from allranks.verdict import Verdict, read_verdict


def run(plan: Plan, rank: Rank, control: ControlPlane, launch: int) -> ExitCode:
    """Train as planned.

    Returns:
        The exit code on which all ranks agreed.

    Raises:
        ControlPlaneLost: a rank is gone; nothing was agreed.
    """
    run_dir = Path(plan.run_dir)
    generation = agreed_generation(run_dir, control, launch)
    if generation and (ended := read_verdict(run_dir)) is not None:
        return ended.exit_code  # the ranks had agreed to leave when one was killed on its way out
    ctx = _context(plan, rank, control, launch, generation)
    _announce(ctx)
    try:
        revival = revive(ctx)
        job = set_up(ctx, revival)
        _keep_what_is_loaded()
        train(ctx, job)
        finish(ctx, job)
        verdict = Verdict(
            reason="finished",
            message=f"{job.total_steps} steps; the adapter is in {ctx.run_dir / 'adapter'}",
            exit_code=ExitCode.OK,
            step=job.position.step,
        )
    except StopTraining as stop:
        verdict = verdict_of(stop.reason, str(stop), stop.exit_code, ctx.last_step)
        ctx.events.write("stop", step=verdict.step, reason=stop.reason, message=str(stop))
    except RespawnNow as error:
        start_again(ctx, str(error))
    except ControlPlaneLost:
        ctx.watcher.give_way()
        if ctx.liveness is not None:
            ctx.liveness.give_way()
        ctx.page.leave("lost its peers")
        let_a_save_end(ctx)
        raise
    if ctx.is_main:
        tell_verdict(ctx, verdict)
    if ctx.liveness is not None:
        ctx.liveness.close()
    ctx.control.exchange([])  # nobody leaves before the verdict is on the disk
    ctx.page.leave(verdict.reason)
    ctx.watcher.close()
    ctx.flag.close()
    ctx.events.close()
    return verdict.exit_code


def _context(plan: Plan, rank: Rank, control: ControlPlane, launch: int, generation: int) -> Context:
    place = rank.environment
    run_dir = Path(plan.run_dir)
    console = Console(main=place.rank == 0)
    events = EventLog(run_dir, place.rank, launch, generation)
    store: Any = dist.distributed_c10d._get_default_store() if place.world_size > 1 else None
    ctx = Context(
        plan=plan,
        run_dir=run_dir,
        rank=rank,
        launch=launch,
        generation=generation,
        control=control,
        flag=FailureFlag(world_size=place.world_size, store=store),
        watcher=Watcher(
            rank=place.rank,
            world_size=place.world_size,
            store=store,
            key=f"launch-{launch}-g{generation}",
            deadline_s=plan.config.oom.stop_timeout_s,
            leave=lambda declared: leave_as_declared(ctx, declared),
        ),
        injector=FaultInjector(
            plan.injections, rank=place.rank, device=str(rank.device), fired=injected_dir(run_dir, launch)
        ),
        pulse=Pulse(),
        page=ProgressPage(run_dir, place.rank, launch=launch, generation=generation),
        meter=MemoryMeter(rank.device),
        stopwatch=Stopwatch(rank.device),
        first_oom=FirstOom(
            rank.device, run_dir, launch=launch, rank=place.rank, history=plan.config.oom.memory_history
        ),
        events=events,
        console=console,
        policy=first_caps(plan.config),
    )

    control.waiting = ctx.pulse.waiting
    if (timeout_s := plan.config.oom.hang_timeout_s) is not None:
        ctx.liveness = Liveness(
            rank=place.rank,
            world_size=place.world_size,
            store=store or _own_store(),
            key=f"launch-{launch}-g{generation}",
            pulse=ctx.pulse,
            hang_timeout_s=timeout_s,
            stacks_dir=run_dir / "stacks" / f"L{launch:04d}-g{generation}",
            on_hang=lambda hung: leave_hung(ctx, hung),
        )
    listen(
        run_dir,
        restarted_by_agent=ctx.can_respawn and place.world_size > 1,
        stop=ctx.signalled.append,
        leaves=lambda: ctx.page.now.left is not None,
        leave=lambda: leave_for_peers(ctx),
    )
    return ctx


def _keep_what_is_loaded() -> None:
    """No collection looks at it again: half a million objects, 0.2 s in each failure's handling, stay to the end."""
    gc.collect()
    gc.freeze()


def _own_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


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
