"""Real runs without padding on a GPU: each flash kernel gives the losses of padded `sdpa` attention, in bf16.

Two ranks share the card over gloo. The package must be installed, and flash-attn for its rung.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import Finished, classifier_config, config_of, launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = 1e-2
"""Two kernels round in another order; in bf16 one rounding is 4e-3."""


def _run(model: Path, folder: Path, profile: str, attention: str, *, classes: bool = False) -> Finished:
    changes = {
        "model__attn_implementation": attention,
        "output__name": f"{profile}-{attention}-{classes}",
        "training__learning_rate": 2e-4,
    }
    config = classifier_config(model, folder, **changes) if classes else config_of(model, folder, **changes)
    run = launch(config, folder, profile=profile, ranks=2, device="cuda")
    assert run.status == 0, run.output
    [found] = run.events("model")
    assert found["padding_free"] == (attention != "sdpa")
    assert attention in (found["attention"], "auto")
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flash")


@pytest.fixture(scope="module")
def padded(tiny_llama_dir: Path, folder: Path) -> Finished:
    return _run(tiny_llama_dir, folder, "ddp", "sdpa")


@pytest.mark.parametrize(
    ("profile", "attention"),
    [("ddp", "auto"), ("ddp", "varlen_attn"), ("zero2", "varlen_attn"), ("zero3", "varlen_attn"), ("fsdp", "auto")],
)
def test_losses_are_those_of_padded_attention(
    profile: str, attention: str, padded: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    run = _run(tiny_llama_dir, folder, profile, attention)
    assert run.committed() == padded.committed()
    assert run.losses() == pytest.approx(padded.losses(), rel=TOLERANCE)


@pytest.mark.parametrize("attention", ["flash_attention_2", "varlen_attn"])
def test_a_classifier_has_the_losses_of_padded_attention(attention: str, tiny_llama_dir: Path, folder: Path) -> None:
    expected = _run(tiny_llama_dir, folder, "ddp", "sdpa", classes=True)
    run = _run(tiny_llama_dir, folder, "ddp", attention, classes=True)
    assert run.losses() == pytest.approx(expected.losses(), rel=TOLERANCE)
