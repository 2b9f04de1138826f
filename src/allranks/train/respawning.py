"""The start of a generation: which one it is, what ended the one before, and whether the ranks go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.config.schema import recomputes_all
from allranks.coordinator.agreement import ControlPlane
from allranks.coordinator.autopsy import examine, read_caps
from allranks.coordinator.policy_state import PolicyState
from allranks.coordinator.respawn import Death, GiveUp, may_go_on, read_ledger, started, write_ledger
from allranks.errors import ExitCode, StopTraining
from allranks.events import read_events
from allranks.lineage import last_step
from allranks.train.context import Context
from allranks.train.together import Attempt, remember_caps, together
from allranks.units import plural


@dataclass(frozen=True, kw_only=True)
class Revival:
    """What all ranks know of the death before them.

    Attributes:
        death: why the last generation ended.
        used: of the budget of this cause, this restart included.
    """

    death: Death
    used: int


def agreed_generation(run_dir: Path, control: ControlPlane, launch: int) -> int:
    """Count this start; the same number on all ranks. On each node torchelastic counts otherwise, so rank 0 does.

    Raises:
        StopTraining: the run directory can't be written.
    """
    text = ""
    if control.rank == 0:
        try:
            text = str(started(run_dir, launch).generation)
        except OSError as error:
            text = f"{error.filename or run_dir}: {error.strerror}"
    text = control.broadcast_text(text)
    if not text.isdecimal():
        raise StopTraining("storage", f"the run directory can't be written: {text}", ExitCode.STORAGE)
    return int(text)


def revive(ctx: Context) -> Revival | None:
    """Find out why the last generation ended, and take over its caps; None in the first one.

    Raises:
        StopTraining: the budget of this cause is used up, or the same fault came back at the same place.
    """
    if ctx.generation == 0:
        return None

    def look(at: Attempt) -> str:
        at.enter("revive")
        return _judged(ctx) if ctx.is_main else ""

    told, _ = together(ctx, "load", 0, look)
    fields = json.loads(ctx.control.broadcast_text(told))
    if fields["state"] is not None:
        ctx.policy = PolicyState.from_json(fields["state"]).reborn()
        remember_caps(ctx)
    if fields["give_up"] is not None:
        stop = GiveUp(**fields["give_up"])
        raise StopTraining(stop.reason, stop.message, ExitCode(stop.exit_code))
    return Revival(death=Death.from_dict(fields["death"]), used=fields["used"])


def _judged(ctx: Context) -> str:
    """Rank 0's judgement as JSON; the death is in the ledger then."""
    ledger = read_ledger(ctx.run_dir)
    assert ledger is not None and ledger.generation == ctx.generation
    known = read_caps(ctx.run_dir, launch=ctx.launch)
    finding = examine(ctx.run_dir, launch=ctx.launch, generation=ctx.generation - 1, known=known)
    ledger = ledger.after(finding.death)
    write_ledger(ctx.run_dir, ledger)
    give_up = may_go_on(ledger, max_respawns=ctx.plan.config.oom.max_respawns)
    return json.dumps(
        {
            "give_up": None if give_up is None else asdict(give_up),
            "state": None if finding.state is None else finding.state.to_json(),
            "death": asdict(finding.death),
            "used": ledger.used(finding.death.cause),
        }
    )


def tell(ctx: Context, revival: Revival, resumed_step: int) -> None:
    """Say once what happened and where the run goes on."""
    death = revival.death
    caps = ctx.policy.train.caps
    budget = ctx.plan.config.oom.max_respawns
    made = max(death.committed_step, last_step(read_events(ctx.run_dir, ctx.rank.environment.rank)))
    abandoned = range(resumed_step + 1, made + 1)
    ctx.events.write(
        "respawn",
        step=death.step,
        phase=death.phase,
        failure=str(death.kind),
        failed_rank=death.rank,
        message=death.message,
        caps=[caps.max_samples, caps.max_tokens],
        gradient_checkpointing=ctx.policy.checkpointing,
        skipped_samples=list(ctx.policy.skipped),
        resumed_step=resumed_step,
        abandoned_steps=[abandoned.start, abandoned.stop - 1] if abandoned else [],
        used=revival.used,
        max_respawns=budget,
    )
    if not ctx.is_main:
        return
    where = f"the checkpoint of step {resumed_step}" if resumed_step else "step 0, for there is no checkpoint yet"
    are = "is" if len(abandoned) == 1 else "are"
    again = f" ({plural(len(abandoned), 'step')} after it {are} made again)" if abandoned else ""
    smaller = f", with {_limits(ctx)}" if death.cut else ""
    ctx.console.say(
        f"{death.message}; all ranks were started again (restart {ctx.generation}; {revival.used} of {budget} "
        f"used for this cause) and go on from {where}{again}{smaller}"
    )


def _limits(ctx: Context) -> str:
    words = [ctx.policy.train.caps.words()]
    if ctx.policy.checkpointing and not recomputes_all(ctx.plan.config.training):
        words.append("gradient checkpointing of all layers")
    if ctx.policy.skipped:
        words.append(f"{plural(len(ctx.policy.skipped), 'sample')} left out")
    return ", ".join(words)
