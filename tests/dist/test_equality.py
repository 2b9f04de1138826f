"""The same run on every profile: same gradients, losses and adapter as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runs import Finished, config_of, launch_bare

pytestmark = pytest.mark.timeout(600)

PROFILES = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2, "fsdp": 2}
GRADIENT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 2e-2
"""Adam turns the sign of rounding noise into an update of the learning rate's size."""


def _run(profile: str, ranks: int, model: Path, folder: Path, **observe: Any) -> tuple[Finished, dict[str, Any]]:
    gradients = folder / f"{profile}-{len(observe)}.safetensors"
    name = "-".join([profile, *observe])
    config = config_of(model, folder, output__name=name)
    run = launch_bare(config, folder, profile=profile, ranks=ranks, observe={"gradients": str(gradients), **observe})
    assert run.status == 0, run.output
    from safetensors.torch import load_file

    return run, load_file(gradients)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equality")


@pytest.fixture(scope="module")
def single(tiny_llama_dir: Path, folder: Path) -> tuple[Finished, dict[str, Any]]:
    return _run("single", 1, tiny_llama_dir, folder)


def _flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return float((_flat(found) - _flat(expected)).norm() / _flat(expected).norm())


def _update(run: Finished) -> dict[str, torch.Tensor]:
    """What training added; lora_B starts at zero, so it is its own update."""
    return {name: t for name, t in run.tensors("adapter/adapter_model.safetensors").items() if "lora_B" in name}


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "single"])
def test_profile_equals_single(
    profile: str, single: tuple[Finished, dict[str, Any]], tiny_llama_dir: Path, folder: Path
) -> None:
    expected, expected_gradients = single
    run, gradients = _run(profile, PROFILES[profile], tiny_llama_dir, folder)
    assert run.committed() == expected.committed()
    assert _distance(gradients, expected_gradients) < GRADIENT_TOLERANCE
    assert run.losses() == pytest.approx(expected.losses(), rel=LOSS_TOLERANCE)
    assert len(run.losses()) == 10
    assert _distance(_update(run), _update(expected)) < UPDATE_TOLERANCE


@pytest.mark.parametrize("change", ["drop", "twice"])
def test_one_sample_lost_or_doubled_does_not_pass_for_equal(
    change: str, single: tuple[Finished, dict[str, Any]], tiny_llama_dir: Path, folder: Path
) -> None:
    expected, expected_gradients = single
    run, gradients = _run("ddp", 2, tiny_llama_dir, folder, **{change: True})
    assert _distance(gradients, expected_gradients) > 100 * GRADIENT_TOLERANCE
    assert run.losses() != pytest.approx(expected.losses(), rel=LOSS_TOLERANCE)
    assert _distance(_update(run), _update(expected)) > UPDATE_TOLERANCE
