"""What every part of a worker needs: who we are, how the ranks agree, where things are written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.checkpoints.background import BackgroundWriter
from allranks.coordinator.agreement import ControlPlane
from allranks.coordinator.attempt import AttemptKey, AttemptPhase, Failed, FailureFlag
from allranks.coordinator.failure import FailureRecord
from allranks.coordinator.heartbeats import Pulse
from allranks.coordinator.injection import FaultInjector
from allranks.coordinator.liveness import Liveness
from allranks.coordinator.policy_state import PolicyState
from allranks.coordinator.progress import ProgressPage
from allranks.coordinator.watcher import Watcher
from allranks.events import EventLog, read_events
from allranks.lineage import last_step
from allranks.plan.plan import Plan
from allranks.rundir import stop_requested
from allranks.train.console import Console
from allranks.train.memory import MemoryMeter
from allranks.train.process import Rank
from allranks.train.snapshot import FirstOom
from allranks.train.stopwatch import Stopwatch


@dataclass(kw_only=True)
class Context:
    """One rank of one launch.

    Attributes:
        plan: what is to be done.
        run_dir: the run directory.
        rank: this rank's place, joined.
        launch: number of the launch, from 1.
        generation: how often the ranks of this launch were restarted.
        control: votes.
        flag: tells peers of a failure early.
        watcher: ends all ranks where no vote can.
        injector: faults to make happen.
        pulse: tells the other ranks that this one moves.
        liveness: watches all ranks for one that does not; None if that is switched off.
        page: where this rank is, for the time after its death.
        meter: memory of each attempt.
        stopwatch: time of each micro-batch.
        first_oom: keeps what the GPU's memory held when this rank first ran out of it.
        events: this rank's event log.
        console: what a person sees of this rank.
        policy: caps and what is known about them; the same on all ranks.
        committed_step: last optimizer step made; the same on all ranks.
        lockstep: forward and backward contain collectives, so a failure in them can't be voted on.
        writer: writes checkpoints while training goes on, on rank 0.
        signalled: why this process was asked to stop: names of signals, or that a save failed.
        last_failure: record of this rank's own last failure, which a full disk may have refused.
    """

    plan: Plan
    run_dir: Path
    rank: Rank
    launch: int
    generation: int
    control: ControlPlane
    flag: FailureFlag
    watcher: Watcher
    injector: FaultInjector
    pulse: Pulse
    page: ProgressPage
    meter: MemoryMeter
    stopwatch: Stopwatch
    first_oom: FirstOom
    events: EventLog
    console: Console
    policy: PolicyState
    liveness: Liveness | None = None
    committed_step: int = 0
    lockstep: bool = False
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    signalled: list[str] = field(default_factory=list)
    last_failure: FailureRecord | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def is_main(self) -> bool:
        """This is rank 0, which writes and speaks for all."""
        return self.rank.environment.rank == 0

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.rank.environment.world_size

    def key(self, phase: AttemptPhase, step: int, attempt: int) -> AttemptKey:
        """Name of an attempt, the same on all ranks."""
        return AttemptKey(launch=self.launch, generation=self.generation, step=step, phase=phase, attempt=attempt)

    @property
    def can_respawn(self) -> bool:
        """All ranks are started again when they leave: by torchelastic, or by `allranks run` if there is one rank."""
        return self.rank.environment.under_launcher and self.plan.config.oom.max_respawns > 0

    @property
    def last_step(self) -> int:
        """`committed_step`; until that is restored, the last one of the ranks before these."""
        return self.committed_step or last_step(read_events(self.run_dir, self.rank.environment.rank))

    def entered(self, phase: str, step: int, samples: int, tokens: int) -> None:
        """This rank has come to another phase, or to another micro-batch."""
        self.pulse.beat(phase, step)
        self.page.at(phase, committed_step=self.committed_step, step=step, samples=samples, tokens=tokens)

    def note(self, message: str) -> None:
        """Say once what differs from what was asked: one line and one event, on rank 0."""
        if self.is_main:
            self.console.say(message)
            self.events.write("note", message=message)

    def stop_wanted(self) -> str | None:
        """Why this rank was asked to stop: a signal's name, or the reason in the run directory; None if it wasn't."""
        if self.signalled:
            return self.signalled[0]
        return stop_requested(self.run_dir) if self.is_main else None

    def record(self, failed: Failed, key: AttemptKey, phase: str, **where: Any) -> FailureRecord:
        """Leave this rank's own record of a failure: a file, an event, a line."""
        what = failed.classification
        record = FailureRecord(
            launch=key.launch,
            generation=key.generation,
            step=key.step,
            phase=phase,
            attempt=key.attempt,
            rank=self.rank.environment.rank,
            kind=what.kind,
            message=failed.message,
            sticky=what.sticky,
            bytes_asked=what.bytes_asked,
            bytes_free=what.bytes_free,
            **where,
        )
        self.last_failure = record
        if record.write(self.run_dir) is None:
            self.console.say(f"the failure record of step {key.step} could not be written")
        self.events.write(
            "failure",
            step=key.step,
            phase=phase,
            failure=str(what.kind),
            message=failed.message,
            attempt=key.attempt,
            sample_ids=list(record.sample_ids),
            tokens=record.tokens,
            bytes_asked=what.bytes_asked,
            bytes_free=what.bytes_free,
        )
        return record
