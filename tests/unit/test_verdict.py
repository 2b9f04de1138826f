from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks import verdict as verdict_module
from allranks.errors import ExitCode
from allranks.verdict import VERDICT_FILE, Verdict, prepare_verdict, read_verdict, write_verdict

FINISHED = Verdict(reason="finished", message="20 steps", exit_code=ExitCode.OK, step=20)


def test_a_run_without_a_verdict(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None


@given(
    verdict=st.builds(
        Verdict,
        reason=st.sampled_from(["finished", "interrupted", "out_of_memory", "not_finite", "storage", "failure"]),
        message=st.text(),
        exit_code=st.sampled_from(ExitCode),
        step=st.integers(min_value=0),
    )
)
def test_what_is_written_is_read(verdict: Verdict, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write_verdict(run_dir, verdict)
    assert read_verdict(run_dir) == verdict
    assert [path.name for path in run_dir.iterdir()] == [VERDICT_FILE]


def test_the_file_is_versioned_json_for_other_programs(tmp_path: Path) -> None:
    write_verdict(tmp_path, Verdict(reason="storage", message="disk full", exit_code=ExitCode.STORAGE, step=7))
    assert json.loads((tmp_path / VERDICT_FILE).read_text()) == {
        "verdict_version": 1,
        "reason": "storage",
        "message": "disk full",
        "exit_code": 6,
        "step": 7,
    }


def test_a_later_verdict_replaces_the_earlier_one(tmp_path: Path) -> None:
    write_verdict(tmp_path, FINISHED)
    later = Verdict(reason="interrupted", message="SIGTERM", exit_code=ExitCode.INTERRUPTED, step=3)
    write_verdict(tmp_path, later)
    assert read_verdict(tmp_path) == later


def test_discarding_is_allowed_where_there_is_none(tmp_path: Path) -> None:
    prepare_verdict(tmp_path)
    write_verdict(tmp_path, FINISHED)
    prepare_verdict(tmp_path)
    assert read_verdict(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ('"finished"', "has no attribute"),
        ('{"verdict_version": 2}', "verdict version 2 is not 1: written by another allranks"),
        ('{"verdict_version": 1}', "exit_code"),
        ('{"verdict_version": 1, "reason": "finished", "message": "", "exit_code": 9, "step": 0}', "9 is not a valid"),
        (
            '{"verdict_version": 1, "reason": "tired", "message": "", "exit_code": 0, "step": 0}',
            "reason 'tired' is none of finished, interrupted, out_of_memory",
        ),
    ],
)
def test_a_file_that_is_no_verdict_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / VERDICT_FILE).write_text(text)
    with pytest.raises(ValueError, match=complaint) as raised:
        read_verdict(tmp_path)
    assert str(tmp_path / VERDICT_FILE) in str(raised.value)


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_full_disk_has_room_for_a_verdict(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    prepare_verdict(tmp_path)
    monkeypatch.setattr(verdict_module, "replace_text", refuse)
    write_verdict(tmp_path, Verdict(reason="storage", message="ü" * length, exit_code=ExitCode.STORAGE, step=7))
    found = read_verdict(tmp_path)
    assert found is not None
    assert (found.reason, found.exit_code, found.step) == ("storage", ExitCode.STORAGE, 7)
    assert found.message.startswith("ü" * 10)
    assert [path.name for path in tmp_path.iterdir()] == [VERDICT_FILE]
    with pytest.raises(OSError, match="No space left"):
        write_verdict(tmp_path, FINISHED)


def test_the_room_for_a_verdict_is_given_back(tmp_path: Path) -> None:
    prepare_verdict(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    write_verdict(tmp_path, FINISHED)
    assert [path.name for path in tmp_path.iterdir()] == [VERDICT_FILE]
