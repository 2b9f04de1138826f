"""The run directory's disk is full at the second save: all ranks stop, the first checkpoint stays and is resumed."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.checkpoints.store import CheckpointStore
from runs import config_of, launch

RANK = 256
CHECKPOINT_BYTES = 3 * 4 * 2048 * RANK
"""Adapter and AdamW's two moments of the tiny Llama, fp32: 2,048 trained parameters for each rank of the adapter."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    size = f"size={CHECKPOINT_BYTES * 3 // 2}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.timeout(240)
def test_a_disk_that_is_full_at_the_second_save(tiny_llama_dir: Path, small_disk: Path, tmp_path: Path) -> None:
    config = config_of(
        tiny_llama_dir,
        tmp_path,
        output__dir=str(small_disk),
        output__name="full",
        output__save_steps=4,
        lora__r=RANK,
        training__max_steps=14,
    )
    run = launch(config, tmp_path, profile="ddp", ranks=2)
    assert run.status == 6, run.output
    verdict = run.verdict
    assert (verdict["reason"], verdict["exit_code"]) == ("storage", 6)
    # Written in the background: the failure travels with a vote of the next steps, long before a save is due again.
    stops = [(event["reason"], event["step"]) for rank in (0, 1) for event in run.events("stop", rank)]
    assert stops == [("storage", verdict["step"])] * 2
    assert 8 < verdict["step"] < 12
    assert [max(event["step"] for event in run.events("step", rank)) for rank in (0, 1)] == [verdict["step"]] * 2
    assert [event["step"] for event in run.events("save")] == [4]

    checkpoints = run.run_dir / "checkpoints"
    head = f"the checkpoint of step 8 was not written to {checkpoints}/step-00000008-"
    assert verdict["message"].startswith(head), verdict["message"]
    assert "No space left on device" in verdict["message"]
    assert re.search(r"needs 6\.0\d? MiB, free \d+(\.\d+)? [KM]iB", verdict["message"]), verdict["message"]
    assert "still usable: the checkpoint of step 4" in verdict["message"]
    assert f"exit code 6: storage at step {verdict['step']}: {head}" in run.output
    assert "Traceback" not in run.output

    store = CheckpointStore(run.run_dir, keep=2)
    usable = store.latest()
    assert usable is not None
    assert (usable.step, usable.notes) == (4, ())
    state, adapter, optimizer = store.load(usable)
    assert (state.step, state.consumed) == (4, 32)
    assert sum(tensor.numel() for tensor in adapter.values()) == 2048 * RANK
    assert optimizer.keys() == adapter.keys()
    assert [folder.name for folder in checkpoints.glob("step-*")] == [usable.folder]  # nothing half-written is left

    # With space again, the same command goes on.
    subprocess.run(["mount", "-o", f"remount,size={CHECKPOINT_BYTES * 6}", small_disk], check=True)
    again = launch(config, tmp_path, profile="ddp", ranks=2)
    assert again.status == 0, again.output
    assert again.verdict["reason"] == "finished"
    assert [event["step"] for event in again.events("resume")] == [4]
    assert [event["step"] for event in again.events("step") if event["launch"] == 2] == list(range(5, 15))


def _fill(run_dir: Path) -> None:
    """Once the run has made a step, take all that is left of its disk."""
    events = run_dir / "events" / "rank0.jsonl"
    while not events.exists() or '"kind": "step"' not in events.read_text(encoding="utf-8"):
        time.sleep(0.02)
    with (run_dir.parent / "filling").open("wb", buffering=0) as file:
        for size in (1024**2, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@pytest.mark.timeout(240)
def test_a_disk_that_is_full_to_the_last_byte_has_room_for_the_verdict(
    tiny_llama_dir: Path, small_disk: Path, tmp_path: Path
) -> None:
    config = config_of(
        tiny_llama_dir,
        tmp_path,
        output__dir=str(small_disk),
        output__name="full",
        output__save_steps=30,
        lora__r=RANK,
        training__max_steps=60,
    )
    filling = threading.Thread(target=_fill, args=(small_disk / "full",), daemon=True)
    filling.start()
    run = launch(config, tmp_path, profile="ddp", ranks=2)
    filling.join(timeout=10)
    assert run.status == 6, run.output
    assert run.verdict["reason"] == "storage"
    assert run.verdict["message"].startswith("the checkpoint of step 30 was not written"), run.verdict
    assert f"exit code 6: storage at step {run.verdict['step']}: the checkpoint of step 30" in run.output
    assert "Traceback" not in run.output
