"""The loss of any split adds up to the loss of the global batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.train.loss import IGNORED, targets_of
from allranks.train.loss import weighted_loss as loss_of_targets


def weighted_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return loss_of_targets(logits, targets_of(labels, weights.tolist()))


def _batch(samples: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, tokens, 7, generator=generator, dtype=torch.float64).float()
    labels = torch.randint(0, 7, (samples, tokens), generator=generator)
    labels[:, 0] = IGNORED
    return logits, labels


@given(samples=st.integers(1, 6), cut=st.integers(0, 6), seed=st.integers(0, 1000))
def test_any_split_adds_up_to_the_mean_token_loss(samples: int, cut: int, seed: int) -> None:
    logits, labels = _batch(samples, 5, seed)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    targets = int((labels[:, 1:] != IGNORED).sum())
    weights = torch.full((samples,), 1.0 / targets)
    cut = min(cut, samples)
    parts = [slice(0, cut), slice(cut, samples)]
    found = sum(weighted_loss(logits[part], labels[part], weights[part]) for part in parts if part.start < part.stop)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_sample_weights_give_the_mean_of_sample_means() -> None:
    logits, labels = _batch(3, 6, 0)
    labels[1, 3:] = IGNORED
    means = [torch.nn.functional.cross_entropy(logits[i, :-1], labels[i, 1:], ignore_index=IGNORED) for i in range(3)]
    counts = (labels[:, 1:] != IGNORED).sum(1)
    weights = 1.0 / (counts * 3)
    assert float(weighted_loss(logits, labels, weights)) == pytest.approx(float(sum(means) / 3), rel=1e-5)


def test_padding_does_not_count_and_an_eos_that_is_the_pad_token_does() -> None:
    logits, labels = _batch(1, 6, 1)
    padded = torch.cat([logits, torch.randn(1, 3, 7)], dim=1)
    padded_labels = torch.cat([labels, torch.full((1, 3), IGNORED)], dim=1)
    weights = torch.ones(1)
    assert torch.equal(weighted_loss(padded, padded_labels, weights), weighted_loss(logits, labels, weights))
    assert float(weighted_loss(logits, labels, weights)) != float(
        weighted_loss(logits[:, :-1], labels[:, :-1], weights)
    )


def test_a_filler_has_no_loss_and_a_gradient_of_zeros() -> None:
    logits = torch.randn(1, 1, 7, requires_grad=True)
    loss = weighted_loss(logits, torch.full((1, 1), IGNORED), torch.zeros(1))
    loss.backward()
    assert float(loss) == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_classes() -> None:
    logits, classes = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    weights = torch.full((4,), 0.25)
    expected = torch.nn.functional.cross_entropy(logits, classes)
    assert float(weighted_loss(logits, classes, weights)) == pytest.approx(float(expected), rel=1e-6)


def test_logits_in_bf16_are_summed_in_fp32() -> None:
    logits, labels = _batch(2, 5, 3)
    found = weighted_loss(logits.bfloat16(), labels, torch.ones(2))
    assert found.dtype == torch.float32
