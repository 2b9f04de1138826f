"""The coordinator as a library, with one rank: cutting, scaling, retries, refusals, the Trainer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

from allranks.caps import Caps
from allranks.coordinator.failure import read_all
from allranks.library import Coordinator, StopTraining, UserError
from allranks.library.samples import cut, length_of, row_count
from allranks.library.trainer import CoordinatedTrainer, CoordinatorMixin

ROOT = Path(__file__).resolve().parents[2]
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Samples


@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    max_samples=st.integers(1, 9),
    max_tokens=st.none() | st.integers(1, 60),
)
def test_each_sample_of_a_list_is_in_one_micro_batch_under_the_caps(
    lengths: list[int], max_samples: int, max_tokens: int | None
) -> None:
    samples = [[0] * length for length in lengths]
    parts = cut(samples, Caps(max_samples=max_samples, max_tokens=max_tokens), length_of)
    assert sorted(i for part in parts for i in part.positions) == list(range(len(samples)))
    for part in parts:
        assert part.data == [samples[i] for i in part.positions]
        assert len(part.positions) <= max_samples
        assert part.tokens == len(part.data) * max(1, *map(len, part.data), 0)
        assert len(part.data) == 1 or max_tokens is None or part.tokens <= max_tokens


@given(rows=st.integers(0, 30), width=st.integers(1, 9), max_samples=st.integers(1, 9), max_tokens=st.integers(1, 60))
def test_each_row_of_tensors_is_in_one_micro_batch_under_the_caps(
    rows: int, width: int, max_samples: int, max_tokens: int
) -> None:
    ids = torch.arange(rows * width).reshape(rows, width)
    batch = {"ids": ids, "label": torch.arange(rows), "name": [str(i) for i in range(rows)]}
    parts = cut(batch, Caps(max_samples=max_samples, max_tokens=max_tokens), length_of)
    assert [i for part in parts for i in part.positions] == list(range(rows))
    for part in parts:
        assert torch.equal(part.data["ids"], ids[list(part.positions)])
        assert part.data["label"].tolist() == list(part.positions)
        assert part.data["name"] == [str(i) for i in part.positions]
        assert len(part.positions) <= max_samples
        assert len(part.positions) == 1 or part.tokens <= max_tokens


@pytest.mark.parametrize(
    "batch",
    [{"a": torch.zeros(2, 3), "b": torch.zeros(3)}, {"a": torch.zeros(2), "n": 2}, {"a": torch.tensor(1.0)}, {}],
)
def test_values_without_common_rows_are_refused(batch: dict[str, Any]) -> None:
    assert row_count(batch) is None
    with pytest.raises(UserError, match="no common number of rows"):
        cut(batch, Caps(max_samples=1, max_tokens=None), length_of)


@pytest.mark.parametrize("samples", [iter([1]), "text", torch.zeros(3), 7])
def test_what_is_no_batch_is_refused(samples: Any) -> None:
    with pytest.raises(UserError, match="valid: a list of samples, a dictionary of tensors"):
        cut(samples, Caps(max_samples=1, max_tokens=None), length_of)


def test_the_size_of_a_sample_is_that_of_its_largest_part() -> None:
    assert length_of({"input_ids": [1, 2, 3], "label": 0}) == 3
    assert length_of(torch.zeros(2, 5)) == 10
    assert length_of((torch.zeros(4), 1)) == 4
    assert length_of("four") == 4
    assert length_of(5) == 1


# Steps


def made(
    model: torch.nn.Module | None = None, *, lr: float = 0.1, **options: Any
) -> tuple[torch.nn.Module, Coordinator]:
    """One process on the CPU with SGD."""
    accelerator = Accelerator(cpu=True)
    model = model or line()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return prepared, Coordinator(accelerator, prepared, optimizer, **{"max_samples": 8, **options})


def line() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.1)
    return model


def data(n: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(n, 3, generator=generator), "y": torch.randn(n, 1, generator=generator)}


def squares(model: torch.nn.Module, fits: int = 100) -> Callable[[Any], tuple[torch.Tensor, int]]:
    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        if len(batch["x"]) > fits:
            raise torch.OutOfMemoryError(OOM)
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])

    return forward


def plain_step(model: torch.nn.Module, *, lr: float = 0.1, max_norm: float | None = None) -> tuple[float, float]:
    """The same step by hand; loss and gradient norm."""
    batch = data()
    loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    torch.optim.SGD(model.parameters(), lr=lr).step()
    return loss.item(), norm.item()


@pytest.mark.parametrize("max_samples", [8, 3, 1])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_is_that_of_one_batch_however_it_is_cut(max_samples: int, max_norm: float | None) -> None:
    by_hand = line()
    loss, norm = plain_step(by_hand, max_norm=max_norm)
    assert norm > 0.5
    model, coordinator = made(max_samples=max_samples, max_grad_norm=max_norm)
    done = coordinator.step(data(), squares(model))
    assert (done.loss, done.grad_norm) == pytest.approx((loss, norm), rel=1e-5)
    assert (done.samples, done.targets, done.retries, done.skipped) == (8, 8, 0, False)
    torch.testing.assert_close(model.weight, by_hand.weight)
    torch.testing.assert_close(model.bias, by_hand.bias)


def test_the_same_step_is_taken_again_until_it_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_hand = line()
    loss, _ = plain_step(by_hand)
    model, coordinator = made(record_dir=tmp_path)
    with caplog.at_level(logging.WARNING, logger="allranks"):
        done = coordinator.step(data(), squares(model, fits=2))
    assert (done.retries, done.max_samples, coordinator.caps.max_samples) == (2, 2, 2)
    assert done.loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(model.weight, by_hand.weight)
    assert [message.split("; ")[1].split(" and")[0] for message in caplog.messages] == [
        "all ranks retry with at most 4 samples",
        "all ranks retry with at most 2 samples",
    ]
    first, second = read_all(tmp_path)
    assert (first.kind, first.step, first.attempt, first.samples, first.bytes_asked) == ("cuda_oom", 1, 0, 8, 2 * 2**30)
    assert (second.attempt, second.sample_ids, second.phase) == (1, (0, 1, 2, 3), "forward")
    assert coordinator.step(data(), squares(model, fits=2)).retries == 0


def test_a_failure_in_backward_leaves_nothing_of_its_gradients() -> None:
    by_hand = line()
    plain_step(by_hand)
    model, coordinator = made(max_samples=4)
    calls: list[int] = []

    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        loss, targets = squares(model)(batch)
        calls.append(targets)
        if len(calls) == 2:

            def fail(_: object) -> None:
                raise torch.OutOfMemoryError(OOM)

            loss.register_hook(fail)
        return loss, targets

    assert coordinator.step(data(), forward).retries == 1
    assert calls == [4, 4, 2, 2, 2, 2]
    torch.testing.assert_close(model.weight, by_hand.weight)


def test_one_sample_that_does_not_fit_stops() -> None:
    model, coordinator = made()
    with pytest.raises(StopTraining, match="a micro-batch of one sample can't be split") as stop:
        coordinator.step(data(), squares(model, fits=0))
    assert stop.value.reason == "out_of_memory"
    torch.testing.assert_close(model.weight, line().weight)


def test_retries_are_bounded() -> None:
    model, coordinator = made(max_retries=1)
    with pytest.raises(StopTraining, match="it still fails after 1 retries"):
        coordinator.step(data(), squares(model, fits=1))


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    model, coordinator = made()
    batch = {**data(), "y": torch.full((8, 1), float("nan"))}
    with pytest.raises(StopTraining, match="not finite") as stop:
        coordinator.step(batch, squares(model))
    assert stop.value.reason == "not_finite"
    torch.testing.assert_close(model.weight, line().weight)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: loss, "forward returned a Tensor\n    fix: return (loss, targets)"),
        (lambda loss: (loss.detach(), 1), "has no gradient"),
        (lambda loss: (1.0, 1), "the loss that forward returned is float"),
        (lambda loss: (loss.expand(3), 1), "a tensor of shape [3]"),
        (lambda loss: (loss, 0.5), "the number of targets that forward returned is 0.5"),
        (lambda loss: (loss, -1), "the number of targets that forward returned is -1"),
    ],
)
def test_a_forward_that_breaks_its_contract_is_told_how_to_keep_it(returned: Any, words: str) -> None:
    model, coordinator = made()
    with pytest.raises(StopTraining, match=re.escape(words)):
        coordinator.step(data(), lambda batch: returned(squares(model)(batch)[0]))


def test_a_number_of_targets_may_be_a_tensor() -> None:
    model, coordinator = made()
    assert coordinator.step(data(), lambda batch: (squares(model)(batch)[0], torch.tensor(8))).targets == 8


def test_bf16_parameters_accumulate_in_fp32() -> None:
    """256 + 1 is 256 in bf16."""
    model, coordinator = made(line().to(torch.bfloat16), lr=1e-3, max_samples=1)
    done = coordinator.step([256.0, 1.0], lambda batch: (model.bias.sum() * batch[0], 1))
    assert done.grad_norm == 257.0 / 2


def test_autocast_of_accelerate_is_kept() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = line()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[torch.dtype] = []
    prepared.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    inner: list[bool] = []

    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        prepared.register_forward_pre_hook(lambda *_: inner.append(True))
        return squares(prepared)(batch)

    done = Coordinator(accelerator, prepared, optimizer, max_samples=8).step(data(), forward)
    loss, _ = plain_step(line())
    assert done.loss != loss  # bf16 was at work
    assert done.loss == pytest.approx(loss, rel=0.02)


def with_scaler(initial_scale: float) -> tuple[torch.nn.Module, Coordinator, torch.amp.GradScaler]:
    """An accelerator with a scaler, as mixed_precision="fp16" has on a GPU."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale)
    model = line()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return prepared, Coordinator(accelerator, prepared, optimizer, max_samples=3, max_grad_norm=0.5), accelerator.scaler


def test_the_loss_scale_changes_neither_loss_nor_update() -> None:
    by_hand = line()
    loss, norm = plain_step(by_hand, max_norm=0.5)
    model, coordinator, _ = with_scaler(2.0**10)
    done = coordinator.step(data(), squares(model))
    assert (done.loss, done.grad_norm, done.skipped) == pytest.approx((loss, norm, False), rel=1e-5)
    torch.testing.assert_close(model.weight, by_hand.weight)


def test_an_overflow_of_the_loss_scale_skips_the_update_and_lowers_the_scale() -> None:
    model, coordinator, scaler = with_scaler(2.0**127)
    assert coordinator.step(data(), squares(model)).skipped
    torch.testing.assert_close(model.weight, line().weight)
    assert scaler.get_scale() == 2.0**126


def test_an_optimizer_without_the_loss_scale_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = line()
    with pytest.raises(UserError, match="the optimizer is a SGD, which knows nothing of the fp16 loss scale"):
        Coordinator(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), max_samples=1)


def test_dropout_leaves_the_generators_where_they_were() -> None:
    """Else a retry would change the order of the samples that a loader draws later."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), line())
    prepared, coordinator = made(model)
    torch.manual_seed(3)
    untouched = torch.rand(3)
    torch.manual_seed(3)
    losses = [coordinator.step(data(), squares(prepared, fits=4)).loss]
    assert torch.equal(torch.rand(3), untouched)
    losses.append(coordinator.step(data(), squares(prepared)).loss)
    assert losses[0] != losses[1]


# Refusals


def refused(model: torch.nn.Module, **changes: Any) -> str:
    given = {"distributed_type": "NO", "gradient_accumulation_steps": 1, "num_processes": 1, "scaler": None}
    accelerator = SimpleNamespace(process_index=0, **(given | changes))
    with pytest.raises(UserError) as error:
        Coordinator(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), max_samples=1)
    return str(error.value)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_a_model_that_is_spread_is_refused(kind: str) -> None:
    message = refused(line(), distributed_type=kind)
    assert f"under {kind}" in message
    assert "fix: use DDP or one process here; `allranks run` has profiles for zero2, zero3 and fsdp" in message


def test_what_cannot_be_taken_again_is_refused() -> None:
    assert "give step() all samples of this rank" in refused(line(), gradient_accumulation_steps=4)
    assert "give the model that accelerator.prepare returned" in refused(line(), num_processes=2)
    assert "BatchNorm1d: batch normalisation" in refused(torch.nn.Sequential(line(), torch.nn.BatchNorm1d(1)))
    assert "wrapped as OptimizedModule" in refused(torch.compile(line()))
    assert "keep them in fp32" in refused(line().half(), scaler=object())
    other = line()
    with pytest.raises(UserError, match="of the 2 trained parameters in the optimizer, 2 are not the model's"):
        Coordinator(Accelerator(cpu=True), line(), torch.optim.SGD(other.parameters(), lr=0.1), max_samples=1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"max_samples": 0}, "max_samples=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_grad_norm": 0.0}, "None clips nothing"),
    ],
)
def test_values_are_checked(option: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made(**option)


def test_a_frozen_model_is_refused() -> None:
    model = line()
    frozen = torch.nn.Sequential(model)
    for p in frozen.parameters():
        p.requires_grad_(False)
    assert "no parameter that requires a gradient" in refused(frozen)


# transformers.Trainer


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Language-model samples padded to 10 tokens, or sequences with a class."""

    def __init__(self, *, classes: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = []
        for n in torch.randint(3, 11, (24,), generator=generator).tolist():
            ids = torch.randint(1, 32, (10,), generator=generator)
            mask = (torch.arange(10) < n).long()
            labels = ids[0] % 3 if classes else torch.where(mask.bool(), ids, -100)
            self._rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


def train(
    folder: Path, trainer_class: Any, *, classes: bool = False, fits: int = 100, loss_func: Any = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses, weights and trainer of three steps of two batches of four."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TrainingArguments

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_labels=3, pad_token_id=0, **shape)
    model = LlamaForSequenceClassification(config) if classes else LlamaForCausalLM(config)

    def out_of_memory(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        if len(inputs["input_ids"]) > fits:
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(out_of_memory, with_kwargs=True)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = trainer_class(model, args, train_dataset=Tokens(classes=classes), compute_loss_func=loss_func)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach() for name, p in model.named_parameters()}, trainer


def token_losses(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


class TokenMean(Trainer):  # type: ignore[misc]
    """A mean over the targets of a batch, which the Trainer divides by the number of batches."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        inputs = dict(inputs)
        return token_losses(model(**{**inputs, "labels": None}).logits, inputs["labels"], "mean")


class OurTokenMean(CoordinatorMixin, TokenMean):
    pass


@pytest.mark.parametrize(
    ("plain", "ours", "classes"),
    [
        (Trainer, CoordinatedTrainer, False),  # divided by the targets of the accumulated batch
        (Trainer, CoordinatedTrainer, True),  # a mean, although the model is given that number
        (TokenMean, OurTokenMean, False),  # a mean, and the pieces have unequal numbers of targets
    ],
)
@pytest.mark.parametrize("fits", [100, 2, 1])
def test_the_trainer_keeps_losses_and_weights(plain: Any, ours: Any, classes: bool, fits: int, tmp_path: Path) -> None:
    plain_losses, plain_weights, _ = train(tmp_path, plain, classes=classes)
    losses, weights, trainer = train(tmp_path, ours, classes=classes, fits=fits)
    assert len(losses) == 3
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain_weights[name], rtol=1e-5, atol=1e-7)
    assert trainer.caps.max_samples == min(4, fits)


def test_a_loss_that_is_neither_sum_nor_mean_is_not_cut(tmp_path: Path) -> None:
    def with_a_constant(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return token_losses(outputs.logits, labels, "sum") / num_items_in_batch + 0.1 * outputs.logits.square().mean()

    train(tmp_path, CoordinatedTrainer, loss_func=with_a_constant)
    with pytest.raises(StopTraining, match="neither a sum divided by that number nor a mean") as stop:
        train(tmp_path, CoordinatedTrainer, loss_func=with_a_constant, fits=2)
    assert "fix: lower per_device_train_batch_size" in str(stop.value)


@pytest.mark.parametrize(
    ("option", "words"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size=True"), ({"torch_compile": True}, "OptimizedModule")],
)
def test_the_trainer_refuses_what_it_cannot_take_again(option: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path, CoordinatedTrainer, **option)


# Examples and page


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_needs_less_than_fifteen_lines(name: str) -> None:
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    added = [line for line in lines if line.endswith("# +")]
    # Whatever names allranks or what came from it is marked.
    assert all(line in added for line in lines if re.search(r"^(from|import) allranks|coordinator\b.*=|done\.", line))
    assert 0 < len(added) < 15


def test_python_of_the_page_compiles() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "library.md", "exec")
