"""The worker from joining the others to the verdict."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost
from allranks.coordinator.attempt import FailureFlag
from allranks.coordinator.heartbeats import Hung, Pulse
from allranks.coordinator.injection import FaultInjector
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.liveness import Liveness
from allranks.coordinator.policy import Respawn
from allranks.coordinator.progress import ProgressPage
from allranks.coordinator.watcher import Declared, Watcher
from allranks.errors import RESPAWN_STATUS, ExitCode, StopTraining
from allranks.events import EventLog
from allranks.plan.plan import Plan
from allranks.train.console import Console
from allranks.train.context import Context
from allranks.train.finishing import finish
from allranks.train.loop import train
from allranks.train.process import Rank
from allranks.train.respawning import agreed_generation, revive
from allranks.train.setup import first_caps, set_up
from allranks.train.signals import listen
from allranks.train.together import RespawnNow, last_words
from allranks.train.versions import versions
from allranks.verdict import Verdict, read_verdict, write_verdict


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
    except RespawnNow as error:
        _start_again(ctx, str(error))
    except ControlPlaneLost:
        ctx.watcher.give_way()
        if ctx.liveness is not None:
            ctx.liveness.give_way()
        ctx.page.leave("lost its peers")
        raise
    if ctx.is_main:
        write_verdict(ctx.run_dir, verdict)
        ctx.console.say(f"{verdict.reason}: {verdict.message}")
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
            leave=lambda declared: _leave(ctx, declared),
        ),
        injector=FaultInjector(
            plan.injections, rank=place.rank, device=str(rank.device), fired=run_dir / "injected" / f"L{launch:04d}"
        ),
        pulse=Pulse(),
        page=ProgressPage(run_dir, place.rank, launch=launch, generation=generation),
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
            on_hang=lambda hung: _hung(ctx, hung),
        )
    listen(
        run_dir,
        restarted_by_agent=ctx.can_respawn and place.world_size > 1,
        stop=ctx.signalled.append,
        leave=lambda: _end_for_peers(ctx),
    )
    return ctx


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


def _verdict(reason: str, message: str, exit_code: ExitCode, step: int) -> Verdict:
    return Verdict(reason=reason, message=message, exit_code=exit_code, step=step)  # type: ignore[arg-type]


def _leave(ctx: Context, declared: Declared) -> None:
    """In the watcher's thread, on every rank: the main thread may never come back from its collective."""
    stop = json.loads(declared.message)
    if "respawn" in stop:
        _start_again(ctx, stop["respawn"])
    silent = f" (no answer from ranks {list(declared.silent_ranks)})" if declared.silent_ranks else ""
    verdict = _verdict(stop["reason"], stop["message"] + silent, ExitCode(stop["exit_code"]), ctx.committed_step)
    ctx.events.write("stop", step=ctx.committed_step, reason=verdict.reason, message=verdict.message)
    if ctx.is_main:
        write_verdict(ctx.run_dir, verdict)
        ctx.console.say(f"{verdict.reason}: {verdict.message}")
    sys.stdout.flush()
    os._exit(process_status(ctx.rank, verdict.exit_code))


def _hung(ctx: Context, hung: Hung) -> NoReturn:
    """In a thread of liveness, on every rank that still can: no main thread comes back from this."""
    first = min(rank for rank in range(ctx.world_size) if rank not in hung.not_answering)
    me = ctx.rank.environment.rank
    if me == first:
        culprit = hung.culprits[0] if hung.culprits else None
        at = ctx.page.now
        what = Respawn(state=ctx.policy, kind=FailureKind.HUNG, message=hung.message)
        last_words(ctx, what, failed_rank=culprit, step=at.step, phase=at.phase)
        ctx.console.say(hung.message)
        if not ctx.can_respawn:
            words = f"{hung.message}; {TRAITS[FailureKind.HUNG].advice}"
            write_verdict(ctx.run_dir, _verdict("failure", words, ExitCode.RANK_LOST, ctx.committed_step))
    assert ctx.liveness is not None
    ctx.liveness.kill_not_answering(hung)
    if ctx.can_respawn:
        _start_again(ctx, hung.message)
    sys.stdout.flush()
    os._exit(process_status(ctx.rank, ExitCode.RANK_LOST))


def _start_again(ctx: Context, message: str) -> NoReturn:
    """Leave with all other ranks, to be started again with them."""
    ctx.page.leave("respawn")
    if ctx.is_main:
        ctx.console.say(f"{message}; all ranks start again")
    sys.stdout.flush()
    os._exit(RESPAWN_STATUS)


def _end_for_peers(ctx: Context) -> NoReturn:
    """Another rank has died, and whoever started the ranks ends the others to start all of them again."""
    ctx.page.leave("another rank died")
    sys.stdout.flush()
    os._exit(int(ExitCode.RANK_LOST))


def process_status(rank: Rank, code: ExitCode) -> int:
    """What this process returns: under our launcher 0, for torchelastic would restart the ranks for anything else."""
    return 0 if rank.environment.under_launcher else int(code)


def lost(error: ControlPlaneLost) -> NoReturn:
    """The end of a rank whose peers are gone: at once, for a data plane with a dead rank can't be taken down.

    Where the ranks are started again, this status has torchelastic do so.
    """
    print(f"rank lost: {error}", file=sys.stderr, flush=True)
    os._exit(int(ExitCode.RANK_LOST))
