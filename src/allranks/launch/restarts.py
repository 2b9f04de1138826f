"""What the launcher does for ranks that are started again: it notes how they ended, and sees when it is in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from allranks.coordinator.autopsy import ExitNote, examine, write_exit_note
from allranks.coordinator.kinds import TRAITS
from allranks.coordinator.respawn import read_ledger
from allranks.errors import RESPAWN_STATUS, ExitCode
from allranks.launch.command import TORCHRUN_DIR
from allranks.launch.logs import LAUNCHER_LOG, Console
from allranks.launch.outcome import Death, Outcome, first_death, one_process_death, reported_deaths

_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


class DeathWatch:
    """Watches one launch for ranks that die; when one does, all are started again, unless that is switched off.

    Args:
        run_dir: the run directory.
        log_dir: folder of the launch's logs.
        launch: number of the launch, from 1.
        console: told of each death.
    """

    def __init__(self, run_dir: Path, log_dir: Path, launch: int, console: Console) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._launch = launch
        self._console = console
        self._read_bytes = 0
        self._oom_kills = _oom_kills()
        self.restarts = 0

    def look(self) -> None:
        """Note the deaths that torchrun has reported since the last call."""
        for death in reported_deaths(self._new_text()):
            self._note(death)
        attempts = [path.name.removeprefix("attempt_") for path in (self._log_dir / TORCHRUN_DIR).glob("*/attempt_*")]
        self.restarts = max(map(int, filter(str.isdecimal, attempts)), default=0)

    def ended(self) -> None:
        """The one process of a launch without torchrun has ended, and will be started again."""
        death = one_process_death(self._new_text())
        if death is not None:
            self._note(death)
        self.restarts += 1

    @property
    def in_vain(self) -> bool:
        """Ranks die before they have joined each other, so nobody is there to count restarts."""
        ledger = read_ledger(self._run_dir)
        starts = ledger.starts if ledger is not None and ledger.launch == self._launch else 0
        return self.restarts > starts + (1 if starts else 0)

    def explained(self, outcome: Outcome) -> Outcome:
        """`outcome` in the words of what a dead rank left behind, where no rank starts again to look at it."""
        death = first_death((self._log_dir / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace"))
        if death is None or outcome.exit_code not in (ExitCode.CRASH, ExitCode.RANK_LOST):
            return outcome
        self._write_note(death)
        found = examine(self._run_dir, launch=self._launch, generation=self._generation, known=None).death
        if found.rank is None or found.phase == "start":
            return outcome
        why = "it was not started again, for oom.max_respawns is 0"
        return replace(outcome, message=f"{found.message}; {why}; {TRAITS[found.kind].advice}")

    @property
    def _generation(self) -> int:
        ledger = read_ledger(self._run_dir)
        return max(0, ledger.generation) if ledger is not None and ledger.launch == self._launch else 0

    def _note(self, death: Death) -> None:
        if death.status == RESPAWN_STATUS:
            return  # it has said why
        how = f"was killed by {death.by_signal}" if death.by_signal else f"left with exit status {death.status}"
        if death.status != ExitCode.RANK_LOST:
            self._console.line(f"allranks: rank {death.rank} {how}; the others are ended")
        self._write_note(death)

    def _write_note(self, death: Death) -> None:
        note = ExitNote(rank=death.rank, status=death.status, oom_kills=_oom_kills() - self._oom_kills)
        self._oom_kills += note.oom_kills
        try:
            write_exit_note(self._run_dir, note, launch=self._launch, generation=self._generation)
        except OSError as error:
            self._console.line(f"allranks: how rank {death.rank} ended could not be noted: {error.strerror}")

    def _new_text(self) -> str:
        """Whole lines that accelerate and torchrun wrote since the last call."""
        try:
            with (self._log_dir / LAUNCHER_LOG).open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:
            return ""  # read at the next look, if the disk is only away for a moment
        data = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(data)
        return data.decode(errors="replace")


def _oom_kills() -> int:
    """Processes of this control group that the kernel has killed for want of memory; 0 where it doesn't tell."""
    try:
        lines = _CGROUP_EVENTS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
