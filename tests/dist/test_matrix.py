"""The failure matrix of `allranks drill --matrix`, on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs import environment

pytestmark = pytest.mark.timeout(300)


def _drill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text("model: {name_or_path: some/large-model}\ndata: {train: some/large-set}\n")
    argv = [str(Path(sys.executable).with_name("allranks")), "drill", "run.yaml", "--gpus", "2", *words]
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
