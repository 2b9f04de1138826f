"""From what dead ranks left behind to the cause, and to the caps that the next ones go on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.caps import Caps
from allranks.coordinator.autopsy import (
    ExitNote,
    LastWords,
    examine,
    read_caps,
    write_caps,
    write_exit_note,
    write_last_words,
)
from allranks.coordinator.kinds import FailureKind
from allranks.coordinator.policy_state import PolicyState
from allranks.coordinator.progress import ProgressPage, read_pages
from allranks.coordinator.respawn import Death
from allranks.rundir import launch_log_path

LAUNCH, GENERATION = 3, 1
FULL = "failed: OSError: No space left on device"
STATE = PolicyState.start(train=Caps(max_samples=8, max_tokens=None), evaluation=Caps(max_samples=4, max_tokens=512))


def _page(run_dir: Path, rank: int, left: str | None = None) -> None:
    page = ProgressPage(run_dir, rank, launch=LAUNCH, generation=GENERATION)
    page.at("backward", committed_step=7, step=8, samples=6, tokens=600)
    if left is not None:
        page.leave(left)


def _exit(run_dir: Path, rank: int, status: int, oom_kills: int = 0) -> None:
    note = ExitNote(rank=rank, status=status, oom_kills=oom_kills)
    write_exit_note(run_dir, note, launch=LAUNCH, generation=GENERATION)


def _log(run_dir: Path, rank: int, text: str) -> None:
    path = launch_log_path(run_dir, LAUNCH, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def _found(run_dir: Path, known: PolicyState | None = STATE) -> tuple[Death, PolicyState | None]:
    finding = examine(run_dir, launch=LAUNCH, generation=GENERATION, known=known)
    return finding.death, finding.state


WHERE = "in step 8 (backward) on a micro-batch of 6 samples, 600 tokens"


@pytest.mark.parametrize(
    ("status", "oom_kills", "log", "kind", "how"),
    [
        (-9, 0, "", "killed", "was killed by SIGKILL"),
        (-9, 1, "", "host_killed", "was killed by the kernel for want of host memory (SIGKILL)"),
        (-11, 0, "", "crashed", "crashed in native code (SIGSEGV)"),
        (-64, 0, "", "killed", "was killed by SIGRTMAX"),
        (1, 0, "loading\n", "native_exit", "was ended by native code with exit status 1"),
        (77, 0, "", "native_exit", "ended with exit status 77"),
        (1, 0, "Traceback (most recent call last):\nKeyError: 'x'\n", "other", "failed: KeyError: 'x'"),
        (1, 0, "Traceback (most recent call last):\nOSError: No space left on device\n", "other", FULL),
    ],
)
def test_a_death_without_words_is_told_by_status_page_and_log(
    status: int, oom_kills: int, log: str, kind: str, how: str, tmp_path: Path
) -> None:
    _page(tmp_path, 0, left="lost its peers")
    _page(tmp_path, 1)
    _log(tmp_path, 1, log)
    _exit(tmp_path, 1, status, oom_kills)
    death, state = _found(tmp_path)
    assert (death.kind, death.rank, death.step, death.phase, death.committed_step) == (kind, 1, 8, "backward", 7)
    assert death.message == f"rank 1 {how} {WHERE}"
    assert state == STATE
    assert not death.cut


def test_native_code_that_found_no_gpu_memory_shrinks_the_caps(tmp_path: Path) -> None:
    _log(tmp_path, 1, "CUDA out of memory in an earlier life\n")
    _page(tmp_path, 1)
    _exit(tmp_path, 1, 1)
    assert _found(tmp_path)[0].kind is FailureKind.NATIVE_EXIT  # the earlier life's lines are not this one's
    _log(tmp_path, 1, "Error out of memory at line 380 in file ops.cu\n")
    death, state = _found(tmp_path)
    assert (death.kind, death.cut) == (FailureKind.NATIVE_OOM, True)
    assert "for want of GPU memory (Error out of memory at line 380" in death.message
    assert state is not None
    assert state.train.caps == Caps(max_samples=3, max_tokens=300)
    assert state.evaluation == STATE.evaluation


def test_a_traceback_of_missing_memory_is_a_lack_of_memory(tmp_path: Path) -> None:
    _page(tmp_path, 1)
    _log(tmp_path, 1, "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to\n")
    _exit(tmp_path, 1, 1)
    death, _ = _found(tmp_path)
    assert (death.kind, death.cause, death.cut) == (FailureKind.CUDA_OOM, "memory", True)
    assert death.message.startswith("rank 1 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to in step 8")


def test_one_rank_alone_that_was_asked_to_end_is_named(tmp_path: Path) -> None:
    _page(tmp_path, 0, left="lost its peers")
    _page(tmp_path, 1, left="another rank died")
    _exit(tmp_path, 1, 5)
    death, _ = _found(tmp_path)
    assert (death.kind, death.rank) == (FailureKind.KILLED, 1)
    assert death.message == f"rank 1 was ended by SIGTERM, though no other rank had died, {WHERE}"


def test_ranks_that_left_because_of_another_are_never_the_cause(tmp_path: Path) -> None:
    _page(tmp_path, 0, left="lost its peers")
    _page(tmp_path, 1, left="another rank died")
    _page(tmp_path, 2)
    for rank, status in ((0, 5), (1, -15)):
        _exit(tmp_path, rank, status)
    death, _ = _found(tmp_path)
    assert (death.kind, death.rank) == (FailureKind.LOST, 2)
    assert death.message == f"rank 2 ended without a word {WHERE}"


def test_without_any_sign_that_is_said(tmp_path: Path) -> None:
    death, state = _found(tmp_path, known=None)
    assert (death.kind, death.rank, state) == (FailureKind.LOST, None, None)
    assert death.message == "the ranks ended, and none of them left a sign of why"


def _words(kind: FailureKind, rank: int, samples: int) -> LastWords:
    state = PolicyState.start(
        train=Caps(max_samples=samples, max_tokens=100 * samples), evaluation=STATE.evaluation.caps
    )
    death = Death(kind=kind, message=f"rank {rank}", rank=rank, step=8, phase="forward", committed_step=7, cut=True)
    return LastWords(death=death, state=state)


def test_last_words_come_before_all_signs_and_two_ooms_give_the_smaller_caps(tmp_path: Path) -> None:
    _exit(tmp_path, 0, -9)
    for rank, samples in ((2, 4), (1, 2)):
        words = _words(FailureKind.CUDA_OOM, rank, samples)
        write_last_words(tmp_path, words, launch=LAUNCH, generation=GENERATION, rank=rank)
    write_last_words(tmp_path, _words(FailureKind.CUDA_OOM, 0, 1), launch=LAUNCH, generation=0, rank=0)
    death, state = _found(tmp_path)
    assert death == _words(FailureKind.CUDA_OOM, 1, 2).death
    assert state is not None
    assert state.train.caps == Caps(max_samples=2, max_tokens=200)


def test_caps_are_those_of_their_launch(tmp_path: Path) -> None:
    assert read_caps(tmp_path, launch=LAUNCH) is None
    write_caps(tmp_path, STATE, launch=LAUNCH)
    assert read_caps(tmp_path, launch=LAUNCH) == STATE
    assert read_caps(tmp_path, launch=LAUNCH + 1) is None
    (tmp_path / "caps.json").write_text('{"launch": 3')
    assert read_caps(tmp_path, launch=LAUNCH) is None


def test_a_page_survives_and_only_the_last_two_generations_are_kept(tmp_path: Path) -> None:
    for generation in range(4):
        page = ProgressPage(tmp_path, 0, launch=1, generation=generation)
        page.at("forward", committed_step=generation, step=generation + 1, samples=2, tokens=20)
    page.leave("respawn")
    page.leave("later")
    assert [len(read_pages(tmp_path, launch=1, generation=g)) for g in range(4)] == [0, 0, 1, 1]
    last = read_pages(tmp_path, launch=1, generation=3)[0]
    assert (last.committed_step, last.phase, last.samples, last.left) == (3, "forward", 2, "respawn")


def test_a_page_that_was_cut_while_it_was_written_is_left_out(tmp_path: Path) -> None:
    _page(tmp_path, 0)
    (tmp_path / "progress" / "L0003-g1-rank1").write_bytes(b'{"pid": 12, "log_by\x00\x00')
    assert list(read_pages(tmp_path, launch=LAUNCH, generation=GENERATION)) == [0]


def test_a_folder_that_can_not_be_written_costs_only_the_page(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("in the way")
    page = ProgressPage(tmp_path, 0, launch=1, generation=0)
    page.at("forward", committed_step=0, step=1)
    page.leave("finished")
    assert read_pages(tmp_path, launch=1, generation=0) == {}
