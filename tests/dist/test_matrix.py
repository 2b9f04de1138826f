"""The failure matrix of `allranks drill --matrix`, on CPU ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import environment

pytestmark = pytest.mark.timeout(300)


def _command(folder: Path, *words: str) -> list[str]:
    (folder / "run.yaml").write_text("model: {name_or_path: some/large-model}\ndata: {train: some/large-set}\n")
    return [str(Path(sys.executable).with_name("allranks")), "drill", "run.yaml", "--gpus", "2", *words]


def _drill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = _command(folder, *words)
    return subprocess.run(argv, env=environment(), cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def test_the_matrix_tells_what_recovered_how_and_in_how_long(tmp_path: Path) -> None:
    done = _drill(tmp_path, "--profile", "ddp", "--matrix", "--phases", "backward,save", "--kinds", "oom,sigkill")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "runs/run-matrix-ddp/matrix.json").read_text())
    assert (result["profile"], result["world_size"], result["device"]) == ("ddp", 2, "cpu")
    tiers = {(cell["fault"]["phase"], cell["fault"]["kind"]): cell["tier"] for cell in result["cells"]}
    assert tiers == {
        ("backward", "oom"): "in place",
        ("backward", "sigkill"): "restart",
        ("save", "oom"): "in place",
        ("save", "sigkill"): "restart",
    }
    for cell in result["cells"]:
        assert cell["as_undisturbed"], cell
        assert (cell["seconds"] > 3.0) == (cell["tier"] == "restart"), cell
    table = done.stdout[done.stdout.index("PHASE") :].splitlines()
    assert [line.split()[:3] for line in table[1:5]] == [
        ["backward", "oom", "1"],
        ["backward", "sigkill", "1"],
        ["save", "oom", "1"],
        ["save", "sigkill", "1"],
    ]
    assert all(line.rstrip().endswith("yes") for line in table[1:5])


def test_ctrl_c_ends_the_run_that_goes_on_and_the_matrix_with_it(tmp_path: Path) -> None:
    argv = _command(tmp_path, "--profile", "ddp", "--matrix", "--phases", "forward,backward,save", "--kinds", "oom")
    with (tmp_path / "said").open("w+") as said:
        drill = subprocess.Popen(argv, env=environment(), cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
        try:
            log = tmp_path / "runs/run-matrix-ddp/matrix.log"
            while not log.exists() or "allranks: backward-oom-drill · launch 1" not in log.read_text():
                assert drill.poll() is None
                time.sleep(0.1)
            drill.send_signal(signal.SIGINT)
            status = drill.wait(timeout=60)
        finally:
            drill.kill()
    words = (tmp_path / "said").read_text()
    assert status == 75, words
    assert "[1/3] oom in forward: in place in " in words
    assert "allranks: SIGINT: the ranks save" in words
    assert words.endswith("allranks: exit code 75: stopped on request after 1 of 3 faults\n"), words
    kept = json.loads((tmp_path / "runs/run-matrix-ddp/matrix.json").read_text())
    assert (kept["faults"], [cell["fault"]["phase"] for cell in kept["cells"]]) == (3, ["forward"])
    assert "again, in place" in words


def test_a_matrix_can_be_looked_at_before_it_is_run(tmp_path: Path) -> None:
    done = _drill(tmp_path, "--profile", "ddp", "--matrix", "--kinds", "oom,exit", "--phases", "load,step", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "# ddp on 2 cpu ranks: 5 small runs of 3 steps each",
        f"# in {tmp_path}/runs/run-matrix-ddp, one without a fault, then one for each of these faults:",
        "#   load: oom, exit",
        "#   step of step 2: oom, exit",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_matrix_without_a_sound_first_run_ends_there(tmp_path: Path) -> None:
    done = _drill(tmp_path, "--profile", "ddp", "--matrix", "--set", "training.learning_rate=1e30")
    assert done.returncode == 4, done.stdout + done.stderr
    said = "the run without a fault did not end well, so no fault was tried: not_finite at step 1: "
    assert said in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--matrix", "--phases", "backwards"), "--phases: 'backwards' is none of them\n      valid: load, forward,"),
        ((), "give either --inject, once or more, or --matrix"),
        (("--kinds", "oom", "--inject", "rank=1,step=1,phase=load,kind=oom"), "which was not given"),
    ],
)
def test_what_does_not_go_together_is_one_message(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = _drill(tmp_path, "--profile", "ddp", *words)
    assert done.returncode == 2
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
