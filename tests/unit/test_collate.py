"""Padding is known by its position, so that an EOS that doubles as the pad token stays a target; flat has none."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.data.collate import Collate, flat_batch, pad_batch
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


def _plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_a_flat_sequence_begins_anew_with_each_sample():
    batch = flat_batch(SAMPLES, PAD)
    assert _plain(batch) == {
        "input_ids": [[5, 6, PAD, 7]],
        "position_ids": [[0, 1, 2, 0]],
        "labels": [[-100, 6, PAD, -100]],
        "cu_seq_lens_q": [0, 3, 4],
        "cu_seq_lens_k": [0, 3, 4],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    assert {batch[name].dtype for name in ("input_ids", "position_ids", "labels")} == {torch.int64}
    assert batch["cu_seq_lens_q"].dtype == torch.int32


def test_a_flat_filler_is_one_token_without_a_target():
    batch = _plain(flat_batch([], PAD))
    assert (batch["input_ids"], batch["labels"], batch["cu_seq_lens_q"]) == ([[PAD]], [[-100]], [0, 1])


def test_classes_of_a_flat_sequence_are_one_label_a_sample():
    samples = [Tokens(input_ids=[5, 6], labels=[1]), Tokens(input_ids=[7], labels=[0])]
    assert flat_batch(samples, PAD)["labels"].tolist() == [1, 0]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=7), min_size=1, max_size=5),
    st.booleans(),
)
def test_flat_and_padded_hold_the_same_targets_and_say_what_they_hold(drawn, flat):
    samples = [
        Tokens(input_ids=[token for token, _ in of], labels=[token if target else -100 for token, target in of])
        for of in drawn
    ]
    batch = Collate(pad_token_id=PAD, flat=flat)(samples)
    assert batch["input_ids"].numel() == Collate(pad_token_id=PAD, flat=flat).tokens([len(of) for of in drawn])
    shifted = batch["labels"][:, 1:]
    expected = [label for sample in samples for label in sample.labels[1:] if label != -100]
    assert shifted[shifted != -100].tolist() == expected
