"""The demo as README and launch/demo.sh run it, with few steps: a real model, two ranks, a real allocation failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.demo.__main__ import agreed_shrinks, eval_losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("smollm2_dir")
def test_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks.demo", "--steps", "6", "--workdir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "demo-drill"
    [shrink] = agreed_shrinks(run_dir, 2)
    assert (shrink.step, shrink.failed_rank, shrink.caps[0]) == (3, 1, 2)
    losses = eval_losses(run_dir)
    assert losses is not None
    assert losses[1] < losses[0] - 0.2
    assert "Step 3: rank 1 ran out of memory in backward" in done.stdout
    assert str(run_dir / "adapter") in done.stdout
    assert "Traceback" not in done.stderr
