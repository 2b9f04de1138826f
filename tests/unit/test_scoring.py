"""One model over one set: every sample once whatever fits, and what loss and accuracy are made of."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from allranks.batches.split import Cost
from allranks.caps import Caps
from allranks.data.tokens import FlatTokens, token_set
from allranks.environment import rank_environment
from allranks.errors import ExitCode, StopTraining
from allranks.train.process import Rank
from allranks.train.scoring import Bench

LENGTHS = np.array([3, 5, 2, 7, 4, 2, 6], dtype=np.int64)
CLASSES = np.array([0, 1, 1, 0, 2, 1, 2], dtype=np.int64)
VOCABULARY = 16


class Model:
    """Gives even odds to all tokens, or class 1 to all samples; remembers what it saw; holds at most `room` samples."""

    def __init__(self, *, room: int, classes: bool) -> None:
        self.room, self.classes = room, classes
        self.seen: Counter[int] = Counter()

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.seen.update(input_ids[:, 0].tolist())
        if not self.classes:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))
        return SimpleNamespace(logits=torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(input_ids), 1))


def bench(model: Model, *, count: int = len(LENGTHS)) -> Bench:
    """The first token of each sample is its number."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    ids = np.full(LENGTHS.sum(), 9, dtype=np.int32)
    ids[starts] = range(len(LENGTHS))
    flat = FlatTokens(
        ids=ids,
        targets=np.ones(len(ids), dtype=np.uint8),
        lengths=LENGTHS,
        rows=np.arange(1, 8),
        labels=CLASSES if model.classes else None,
        content="c",
    )
    data = token_set(
        flat,
        max_length=100,
        keep=np.arange(len(LENGTHS)),
        n_targets=np.ones_like(LENGTHS) if model.classes else LENGTHS - 1,
        classes=CLASSES if model.classes else None,
    )
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
    return Bench(
        model=model,
        rank=Rank(accelerator=accelerator, environment=rank_environment({}), profile="single", precision="no"),
        tokenizer=SimpleNamespace(pad_token_id=15),
        data=data,
        count=count,
        answers=None,
        classes=model.classes,
        caps=Caps(max_samples=4, max_tokens=None),
        cost=Cost(),
        progress=lambda _: None,
    )


@pytest.mark.parametrize("room", [4, 3, 1])
def test_every_sample_once_whatever_fits(room: int) -> None:
    model = Model(room=room, classes=False)
    score = bench(model).score("base")
    assert model.seen == Counter(range(len(LENGTHS)))
    assert score.loss == pytest.approx(np.log(VOCABULARY))
    assert (score.accuracy, score.exact_match) == (None, None)


def test_only_the_first_samples() -> None:
    model = Model(room=4, classes=False)
    bench(model, count=3).score("base")
    assert model.seen == Counter(range(3))


def test_accuracy_of_classes() -> None:
    score = bench(Model(room=3, classes=True)).score("base")
    assert score.accuracy == pytest.approx(3 / 7)
    expected = torch.nn.functional.cross_entropy(torch.tensor([[0.0, 1.0, 0.0]]).repeat(7, 1), torch.tensor(CLASSES))
    assert score.loss == pytest.approx(float(expected))


def test_one_sample_that_does_not_fit() -> None:
    with pytest.raises(StopTraining, match=r"one sample of 7 tokens does not fit: OutOfMemoryError") as stop:
        bench(Model(room=0, classes=False)).score("base")
    assert stop.value.exit_code is ExitCode.OUT_OF_MEMORY
