"""The cost that the ranks fit while they train: the same on all of them, kept with the run, and of no effect on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runs import Finished, config_of, launch

pytestmark = [pytest.mark.timeout(200)]

STEPS = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cost")


def _run(model: Path, folder: Path, profile: str, *, fitted: bool) -> Finished:
    changes: dict[str, Any] = {"training__max_steps": STEPS, "training__fit_cost": fitted, "output__name": profile}
    run = launch(config_of(model, folder, **changes), folder, profile=profile, ranks=1 if profile == "single" else 2)
    assert run.status == 0, run.output
    return run


@pytest.fixture(scope="module")
def alone(tiny_llama_dir: Path, folder: Path) -> Finished:
    return _run(tiny_llama_dir, folder, "single", fitted=False)


def test_without_it_nothing_is_measured(alone: Finished) -> None:
    assert not alone.events("cost")
    assert "the split counts" not in alone.output


@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_the_ranks_agree_on_a_cost_and_the_losses_stay(
    profile: str, alone: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    run = _run(tiny_llama_dir, folder, profile, fitted=True)
    [cost], [of_rank_1] = run.events("cost"), run.events("cost", 1)
    wanted = ("step", "a", "b", "c")
    assert [cost[key] for key in wanted] == [of_rank_1[key] for key in wanted]
    assert cost["step"] == 20
    assert cost["a"] > 0 and cost["b"] >= 0 and 0 < cost["c"] < 10
    assert run.committed() == alone.committed()
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert run.output.count("from here on the split counts ") == 1
    [state] = (run.run_dir / "checkpoints").glob(f"step-{STEPS:08d}-*/state.json")
    assert json.loads(state.read_text())["state"]["cost"] == [cost[key] for key in ("a", "b", "c")]
