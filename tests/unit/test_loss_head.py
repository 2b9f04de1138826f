"""The loss without logits is the loss of logits: the kernels, and the models that they are put into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from allranks.errors import ProblemsError
from allranks.train import linear_loss
from allranks.train.head import LADDER, Forward, LossHead, agrees, kernel_of, loss_head, works
from allranks.train.loss import IGNORED, Targets, targets_of, weighted_loss

CPU = torch.device("cpu")
GPU = torch.device("cuda")
KERNELS = LADDER[1:-1]
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()
    model.lm_head.weight.requires_grad_(False)
    return model


def _forward(model: Any) -> Forward:
    def forward(inputs: Mapping[str, torch.Tensor | int]) -> torch.Tensor:
        logits: torch.Tensor = model(**inputs).logits
        return logits

    return forward


def _batch(device: torch.device = CPU) -> tuple[dict[str, torch.Tensor | int], Targets]:
    """Three rows of which the second has one target, and the third the weight of another global batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (3, 9), generator=generator)
    labels = ids.clone()
    labels[1, :8] = IGNORED
    return {"input_ids": ids.to(device)}, targets_of(labels, [0.25, 0.25, 0.25]).to(device)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_each_kernel_gives_loss_and_gradient_of_logits(
    kernel: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_loss, "_PIECE_ELEMENTS", 97 * 5)  # five targets at a time, and a rest of two
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(17, 32, generator=generator)
    weight = torch.randn(97, 32, generator=generator)
    of_bias = torch.randn(97, generator=generator) if bias else None
    targets = Targets(
        positions=torch.arange(17),
        labels=torch.randint(97, (17,), generator=generator),
        weights=torch.full((17,), 0.3),
    )
    mine, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = kernel_of(kernel)(mine, weight, of_bias, targets)
    expected = weighted_loss(torch.nn.functional.linear(plain, weight, of_bias)[None], targets)
    (found * 2).backward()
    (expected * 2).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_the_chunked_kernel_weighs_each_target_and_holds_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = torch.nn.functional.linear

    def watched(*arguments: Any) -> torch.Tensor:
        logits = plain(*arguments)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(linear_loss, "_PIECE_ELEMENTS", 97 * 4)
    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    hidden = torch.randn(10, 8, requires_grad=True)
    weight, labels, weights = torch.randn(97, 8), torch.arange(10), torch.rand(10)
    loss = linear_loss.chunked_loss(hidden, weight, None, labels, weights)
    assert seen == [4 * 97, 4 * 97, 2 * 97]
    losses = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    assert float(loss) == pytest.approx(float((losses * weights).sum()), rel=1e-6)
    [found] = torch.autograd.grad(loss, hidden)
    [expected] = torch.autograd.grad((losses * weights).sum(), hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _gradients(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("kernel", "device", "tolerance"),
    [
        *((kernel, CPU, 1e-5) for kernel in KERNELS),
        *(pytest.param(kernel, GPU, 2e-2, marks=pytest.mark.gpu) for kernel in ("liger", "chunked")),
    ],
)
def test_a_model_with_a_kernel_in_place_of_its_logits(kernel: Any, device: torch.device, tolerance: float) -> None:
    dtype = torch.float32 if device == CPU else torch.bfloat16
    model = _llama().to(device, dtype)
    inputs, targets = _batch(device)
    logits = _forward(model)(inputs)
    expected = weighted_loss(logits, targets)
    expected.backward()
    gradients = _gradients(model)
    seen: list[torch.Tensor] = []
    head = loss_head(model, kernel, device=device, uniform=True)
    assert head.kernel == kernel
    loss, value = head.loss(_forward(model), inputs, targets, seen.append)
    assert loss.dim() == 0 and not value.requires_grad
    assert not seen
    loss.backward()
    assert len(seen) == 1 and seen[0].shape == (3, 9, 32)
    assert float(value) == pytest.approx(float(expected), rel=tolerance)
    assert float((_gradients(model) - gradients).norm() / gradients.norm()) < tolerance
    assert torch.equal(_forward(model)(inputs), logits)  # whoever does not ask for the loss gets logits
    assert works(head, device, dtype) is None
    assert agrees(head, _forward(model), vocabulary=97, device=device, dtype=dtype)
    head.give_up("for the test")
    assert (head.kernel, head.words) == (
        "logits",
        ("the loss is computed from whole logits, which takes more memory: for the test",),
    )
    assert float(head.loss(_forward(model), inputs, targets)[1]) == pytest.approx(float(expected), rel=tolerance)


def test_a_filler_has_no_loss_and_gradients_of_zeros() -> None:
    model = _llama()
    head = loss_head(model, "auto", device=CPU, uniform=True)
    loss, value = head.loss(
        _forward(model), {"input_ids": torch.tensor([[0]])}, targets_of(torch.tensor([[IGNORED]]), [0.0])
    )
    loss.backward()
    assert float(value) == 0.0
    gradients = _gradients(model)
    assert len(gradients) > 0 and not gradients.any()


def test_a_model_that_does_more_with_its_logits_is_found_out() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=0.5, tie_word_embeddings=False)
    model = Gemma2ForCausalLM(config).eval()
    model.lm_head.weight.requires_grad_(False)
    head = loss_head(model, "auto", device=CPU, uniform=True)
    assert head.kernel != "logits"
    assert not agrees(head, _forward(model), vocabulary=97, device=CPU, dtype=torch.float32)


def test_a_kernel_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    head = LossHead("chunked")
    assert works(head, CPU, torch.float32) is None
    plain = linear_loss._ChunkedLoss.backward
    monkeypatch.setattr(linear_loss._ChunkedLoss, "backward", lambda ctx, grad: plain(ctx, grad * 1.01))
    assert (works(head, CPU, torch.float32) or "").startswith("chunked gives another gradient (by 1.0e-02)")


def test_a_kernel_that_fails_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no compiler\nlong story")

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", broken)
    head = loss_head(_llama(), "auto", device=CPU, uniform=True)
    assert head.kernel == "torch"
    why = works(head, CPU, torch.float32)
    assert why == "torch fails here: RuntimeError: no compiler"
    head.step_down(why)
    assert (head.kernel, head.words) == (
        "chunked",
        ("the loss is computed by chunked: torch fails here: RuntimeError: no compiler",),
    )
    assert works(head, CPU, torch.float32) is None
    head.step_down("for the test")
    assert head.kernel == "logits"


def test_which_kernel_is_taken() -> None:
    assert loss_head(_llama(), "auto", device=CPU, uniform=True).kernel == "torch"
    assert loss_head(_llama(), "auto", device=CPU, uniform=False).kernel == "chunked"
    assert loss_head(_llama(), "logits", device=CPU, uniform=True).kernel == "logits"
    classifier = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=3))
    assert loss_head(classifier, "auto", device=CPU, uniform=True).kernel == "logits"


def test_a_trained_output_layer_keeps_its_logits_and_says_so() -> None:
    model = _llama()
    model.lm_head.weight.requires_grad_(True)
    head = loss_head(model, "auto", device=CPU, uniform=True)
    assert head.kernel == "logits"
    assert head.words == (
        "the loss is computed from whole logits, which takes more memory: the output layer is trained",
    )


@pytest.mark.parametrize(
    ("wanted", "uniform", "message"),
    [
        ("liger", True, "liger does not work here: needs a GPU\n      valid: auto, torch, chunked, logits"),
        ("torch", False, "torch does not work here: it can't weigh targets"),
    ],
)
def test_a_kernel_that_is_named_and_does_not_work_is_an_error(wanted: str, uniform: bool, message: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        loss_head(_llama(), wanted, device=CPU, uniform=uniform)
    assert f"training.loss_kernel: {message}" in str(caught.value)
