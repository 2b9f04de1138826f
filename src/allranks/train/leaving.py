"""How a rank leaves where no vote can be held any more: at once, from whatever thread has noticed."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from allranks.coordinator.agreement import ControlPlaneLost
from allranks.coordinator.autopsy import LEFT_FOR_PEERS
from allranks.coordinator.heartbeats import Hung
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import Respawn
from allranks.coordinator.progress import read_pages
from allranks.coordinator.watcher import Declared
from allranks.errors import RESPAWN_STATUS, ExitCode
from allranks.train.context import Context
from allranks.train.process import Rank
from allranks.train.together import last_words
from allranks.verdict import Verdict, write_verdict

_AFTER_YOU_S = 1.0
_END_OF_A_SAVE_S = 20.0
"""For a save under way, so that it counts; torchelastic kills 30 s after it has asked a rank to end."""


def verdict_of(reason: str, message: str, exit_code: ExitCode, step: int) -> Verdict:
    """The verdict of a stop; its reason is one of `verdict.Reason`."""
    return Verdict(reason=reason, message=message, exit_code=exit_code, step=step)  # type: ignore[arg-type]


def tell_verdict(ctx: Context, verdict: Verdict) -> None:
    """Say it, and write it for whoever started the ranks; a disk that refuses it must not look like another failure."""
    ctx.console.say(f"{verdict.reason}: {verdict.message}")
    try:
        write_verdict(ctx.run_dir, verdict)
    except OSError as error:
        ctx.console.say(f"the verdict could not be written: {error.strerror}")


def leave_as_declared(ctx: Context, declared: Declared) -> NoReturn:
    """In the watcher's thread, on every rank: the main thread may never come back from its collective."""
    stop = json.loads(declared.message)
    if "respawn" in stop:
        start_again(ctx, stop["respawn"])
    silent = f" (no answer from ranks {list(declared.silent_ranks)})" if declared.silent_ranks else ""
    verdict = verdict_of(stop["reason"], stop["message"] + silent, ExitCode(stop["exit_code"]), ctx.last_step)
    ctx.events.write("stop", step=verdict.step, reason=verdict.reason, message=verdict.message)
    if ctx.is_main:
        tell_verdict(ctx, verdict)
    let_a_save_end(ctx)
    end_process(process_status(ctx.rank, verdict.exit_code))


def leave_hung(ctx: Context, hung: Hung) -> NoReturn:
    """In a thread of liveness, on every rank that still can: no main thread comes back from this."""
    first = min(rank for rank in range(ctx.world_size) if rank not in hung.not_answering)
    me = ctx.rank.environment.rank
    if me == first:
        culprit = hung.culprits[0] if hung.culprits else None
        pages = read_pages(ctx.run_dir, launch=ctx.launch, generation=ctx.generation)
        at = ctx.page.now if culprit is None else pages.get(culprit, ctx.page.now)
        # A stopped process had no time to publish where it came to; its page knows.
        known = {rank: f"{page.phase}, step {page.step}" for rank, page in pages.items() if rank in hung.not_answering}
        places = zip(hung.ranks, hung.where, strict=True)
        hung = replace(hung, where=tuple(known.get(rank, heard) for rank, heard in places))
        what = Respawn(state=ctx.policy, kind=FailureKind.HUNG, message=hung.message)
        last_words(ctx, what, failed_rank=culprit, step=at.step, phase=at.phase)
        if ctx.can_respawn:
            ctx.console.say(hung.message)
        else:
            words = f"{hung.message}; {TRAITS[FailureKind.HUNG].advice}"
            tell_verdict(ctx, verdict_of("failure", words, ExitCode.RANK_LOST, ctx.last_step))
    assert ctx.liveness is not None
    ctx.liveness.kill_not_answering(hung)
    if ctx.can_respawn:
        start_again(ctx, hung.message)
    let_a_save_end(ctx)
    end_process(process_status(ctx.rank, ExitCode.RANK_LOST))


def let_a_save_end(ctx: Context) -> None:
    """Wait, not for ever, for a checkpoint that is being written: once it is whole, it counts."""
    ctx.writer.let_end(_END_OF_A_SAVE_S)


def start_again(ctx: Context, message: str) -> NoReturn:
    """Leave with all other ranks, to be started again with them."""
    ctx.page.leave("respawn")
    if ctx.is_main:
        ctx.console.say(f"{message}; all ranks start again")
    let_a_save_end(ctx)
    end_process(RESPAWN_STATUS)


def leave_for_peers(ctx: Context) -> NoReturn:
    """Another rank has died, and whoever started the ranks ends the others to start all of them again."""
    ctx.page.leave(LEFT_FOR_PEERS)
    let_a_save_end(ctx)
    end_process(ExitCode.RANK_LOST)


def process_status(rank: Rank, code: ExitCode) -> int:
    """What this process returns: under our launcher 0, for torchelastic would restart the ranks for anything else."""
    return 0 if rank.environment.under_launcher else int(code)


def end_process(status: int) -> NoReturn:
    """The only way in which a rank ends its process.

    Not Python's own: the threads of torch's stores and groups, which it would take down wherever they are, abort a
    process whose work is done, or hide what it died of.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a log on a full disk
            stream.flush()
    os._exit(status)


def failed() -> NoReturn:
    """The end of a rank on an exception that nobody expected, which is being handled."""
    traceback.print_exc()
    end_process(ExitCode.CRASH)


def lost(error: ControlPlaneLost) -> NoReturn:
    """The end of a rank whose peers are gone, without taking down its data plane, for that may never end."""
    with suppress(OSError):
        print(f"rank lost: {error}", file=sys.stderr, flush=True)
    # Torchelastic names the one rank that it saw dead first: that shall be the peer. It then ends this one, sooner.
    time.sleep(_AFTER_YOU_S)
    end_process(ExitCode.RANK_LOST)
