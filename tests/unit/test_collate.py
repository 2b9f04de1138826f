"""Padding: known by its position, so that an EOS that doubles as the pad token stays a target."""

from __future__ import annotations

import torch

from allranks.data.collate import pad_batch
from allranks.data.tokens import Tokens

PAD = 2
"""Also the EOS that ends the samples."""

SAMPLES = [Tokens(input_ids=[5, 6, PAD], labels=[-100, 6, PAD]), Tokens(input_ids=[7], labels=[7])]


def test_padding_on_the_right():
    batch = pad_batch(SAMPLES, PAD)
    assert batch["input_ids"].tolist() == [[5, 6, PAD], [7, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, PAD], [7, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_padding_on_the_left():
    batch = pad_batch(SAMPLES, PAD, padding_side="left")
    assert batch["input_ids"].tolist() == [[5, 6, PAD], [PAD, PAD, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, PAD], [-100, -100, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_classes_are_one_label_a_sample():
    samples = [Tokens(input_ids=[5, 6], labels=[1]), Tokens(input_ids=[7], labels=[0])]
    batch = pad_batch(samples, PAD)
    assert batch["labels"].tolist() == [1, 0]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert pad_batch(samples, PAD, padding_side="left")["position_ids"].tolist() == [[0, 1], [0, 0]]


def test_a_filler_is_one_token_without_a_target():
    batch = pad_batch([], PAD)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[PAD]],
        "attention_mask": [[1]],
        "labels": [[-100]],
        "position_ids": [[0]],
    }
