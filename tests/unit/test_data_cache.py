"""The cache: complete or absent, and a damaged entry is known for one."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from allranks.data.cache import CachedSet, EntryWriter, default_cache_dir, entry_dir, read_entry
from allranks.errors import ProblemsError, UserError


def write(folder: Path, first_id: int = 0, rows: tuple[int, ...] = (1, 4)) -> CachedSet:
    writer = EntryWriter(folder)
    writer.add(rows=rows[:1], ids=[[first_id, 1, 2]], targets=[[0, 1, 1]], labels=["a"])
    writer.add_bad(2, "completion is empty")
    writer.add(rows=rows[1:], ids=[[70_000, 4]], targets=[[1, 0]], labels=[7])
    entry = writer.commit("chat")
    writer.abandon()
    return entry


def test_what_is_written_is_read(tmp_path):
    folder = entry_dir(tmp_path, {"content": "x"})
    assert read_entry(folder) is None
    for entry in (write(folder), read_entry(folder)):
        assert entry is not None
        assert entry.flat.ids.tolist() == [0, 1, 2, 70_000, 4]
        assert entry.flat.targets.tolist() == [0, 1, 1, 1, 0]
        assert entry.flat.lengths.tolist() == [3, 2]
        assert entry.flat.rows.tolist() == [1, 4]
        assert entry.flat.labels is not None
        assert [entry.raw_labels[label] for label in entry.flat.labels] == ["a", 7]
        assert (entry.format, entry.bad) == ("chat", ((2, "completion is empty"),))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left"


def test_an_entry_of_bad_samples_alone(tmp_path):
    writer = EntryWriter(tmp_path / "tokens" / "a")
    writer.add_bad(1, "blank line")
    entry = writer.commit("text")
    assert len(entry.flat.lengths) == len(entry.flat.ids) == 0
    assert entry.flat.labels is None


def test_the_content_is_the_tokens_and_not_where_they_stood(tmp_path):
    first = write(tmp_path / "a").flat.content
    assert write(tmp_path / "b", rows=(5, 9)).flat.content == first
    assert write(tmp_path / "c", first_id=9).flat.content != first


def test_each_setting_has_an_entry_of_its_own(tmp_path):
    entries = [entry_dir(tmp_path, {"content": "x", "format": form}) for form in ("chat", "text")]
    assert entries[0] != entries[1]
    assert entry_dir(tmp_path, {"format": "chat", "content": "x"}) == entries[0]


def cut(folder: Path) -> None:
    (folder / "ids").write_bytes((folder / "ids").read_bytes()[:-4])


def cut_within_a_number(folder: Path) -> None:
    (folder / "ids").write_bytes((folder / "ids").read_bytes()[:-3])


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "targets").read_bytes())
    data[1] ^= 1
    (folder / "targets").write_bytes(data)


def forget_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def cut_meta(folder: Path) -> None:
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:-9])


def strip_meta(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps({"cache_version": 1}))


DAMAGES = [cut, cut_within_a_number, flip_a_bit, forget_meta, cut_meta, strip_meta]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_and_written_over(tmp_path, damage):
    folder = entry_dir(tmp_path, {})
    write(folder)
    damage(folder)
    with pytest.raises(ValueError):
        read_entry(folder)
    assert write(folder).flat.lengths.tolist() == [3, 2]
    assert read_entry(folder) is not None


def test_a_killed_writer_leaves_no_entry_and_its_remains_are_removed_later(tmp_path):
    folder = entry_dir(tmp_path, {})
    killed = EntryWriter(folder)
    killed.add(rows=[1], ids=[[1]], targets=[[1]], labels=[None])
    assert read_entry(folder) is None
    [remains] = folder.parent.iterdir()
    write(folder)
    assert remains.exists(), "another process may still be writing it"
    for path in (remains, *remains.iterdir()):
        os.utime(path, (0, 0))
    write(folder)
    assert not remains.exists()


def test_the_first_of_two_writers_wins_and_both_read(tmp_path):
    folder = entry_dir(tmp_path, {})
    late = EntryWriter(folder)
    late.add(rows=[1], ids=[[1, 2]], targets=[[1, 1]], labels=[None])
    write(folder)
    assert late.commit("text").format == "chat"
    late.abandon()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def _write_in_a_process(folder: Path, ready: object) -> None:
    ready.wait()
    for _ in range(20):
        entry = write(folder)
        assert entry.flat.lengths.tolist() == [3, 2]


@pytest.mark.timeout(60)
def test_processes_may_write_the_same_entry_at_once(tmp_path):
    folder = entry_dir(tmp_path, {})
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)
    processes = [context.Process(target=_write_in_a_process, args=(folder, ready)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_cache_that_cant_be_written_says_how_to_move_it(tmp_path):
    (tmp_path / "tokens").write_text("a file where a folder should be")
    with pytest.raises(ProblemsError) as caught:
        EntryWriter(entry_dir(tmp_path, {}))
    assert "the cache of tokenised sets can't be written: " in str(caught.value)
    assert "set XDG_CACHE_HOME" in str(caught.value)


def test_a_full_disk_is_no_traceback(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = EntryWriter(entry_dir(tmp_path, {}))
    writer._files["ids"].close()
    writer._files["ids"] = Path("/dev/full").open("wb")  # noqa: SIM115
    with pytest.raises(ProblemsError, match="No space left on device"):
        writer.add(rows=[1], ids=[np.arange(100_000).tolist()], targets=[[1] * 100_000], labels=[None])
    writer.abandon()
    assert list((tmp_path / "tokens").iterdir()) == []


def test_the_default_place(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/allranks")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/allranks"


def test_no_home_and_no_cache_is_said(monkeypatch):
    import pwd

    def unknown_user(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UserError, match=r"this user has no home\n    fix: set XDG_CACHE_HOME to a folder"):
        default_cache_dir()
