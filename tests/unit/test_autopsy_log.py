"""What a dead rank said last, told apart from what the rank in its place says first: they share a log."""

from __future__ import annotations

from pathlib import Path

from allranks.coordinator.autopsy import ExitNote, examine, write_exit_note
from allranks.coordinator.progress import ProgressPage
from allranks.coordinator.respawn import Death
from allranks.rundir import launch_log_path

TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "together.py", line 113, in together
[rank0]:     raise RuntimeError
[rank0]: RuntimeError: no room
[rank0]: and a second line
"""


def _death(run_dir: Path, said: str, said_by_the_next: str) -> Death:
    log = launch_log_path(run_dir, 1, 0)
    log.parent.mkdir(parents=True)
    log.touch()
    ProgressPage(run_dir, 0, launch=1, generation=0).at("vote", committed_step=5, step=6)
    log.write_text(said)
    write_exit_note(run_dir, ExitNote(rank=0, status=1), launch=1, generation=0)
    ProgressPage(run_dir, 0, launch=1, generation=1)
    with log.open("a") as file:
        file.write(said_by_the_next)
    return examine(run_dir, launch=1, generation=0, known=None).death


def test_an_exception_is_told_without_what_stands_around_it(tmp_path: Path) -> None:
    death = _death(tmp_path, f"a warning\n{TRACEBACK}rank lost, says a thread\n", "name: 2 rank(s), profile ddp\n")
    assert (death.kind, death.message) == ("other", "rank 0 failed: RuntimeError: no room in step 6 (vote)")


def test_of_two_exceptions_the_outer_one_is_told(tmp_path: Path) -> None:
    outer = TRACEBACK.replace("no room", "no way")
    chain = f"{TRACEBACK}\nThe above exception was the direct cause of the following exception:\n\n{outer}"
    assert _death(tmp_path, chain, "").message == "rank 0 failed: RuntimeError: no way in step 6 (vote)"


def test_the_next_rank_does_not_speak_for_the_dead_one(tmp_path: Path) -> None:
    death = _death(tmp_path, "step 5/10\n", "Traceback (most recent call last):\nKeyError: out of memory\n")
    assert (death.kind, death.message) == (
        "native_exit",
        "rank 0 was ended by native code with exit status 1 in step 6 (vote)",
    )


def test_a_native_lack_of_memory_is_told_in_the_words_of_the_dead_rank(tmp_path: Path) -> None:
    death = _death(tmp_path, "Error out of memory at line 380\n", "name: 2 rank(s), profile ddp\n")
    assert death.kind == "native_oom"
    assert "(Error out of memory at line 380)" in death.message
