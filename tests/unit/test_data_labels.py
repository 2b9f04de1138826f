"""Which label is which class."""

from __future__ import annotations

import pytest

from allranks.data.labels import class_of, find_classes
from allranks.errors import ProblemsError


@pytest.mark.parametrize(
    ("labels", "declared", "num_labels", "names", "by_label"),
    [
        (["b", "a", "c"], (), None, ("a", "b", "c"), {"a": 0, "b": 1, "c": 2}),
        ([1, 0], (), None, ("0", "1"), {0: 0, 1: 1}),
        (["10", "9"], (), None, ("9", "10"), {"9": 0, "10": 1}),
        ([1, 5, 3], (), None, ("1", "3", "5"), {1: 0, 3: 1, 5: 2}),
        ([-1, 1], (), None, ("-1", "1"), {-1: 0, 1: 1}),
        ([0, 2], (), 4, ("0", "1", "2", "3"), {0: 0, 2: 2}),
        ([0, 2], ("no", "maybe", "yes"), None, ("no", "maybe", "yes"), {0: 0, 2: 2}),
        (["01", "1"], (), None, ("01", "1"), {"01": 0, "1": 1}),
        (["a", 1], (), None, ("1", "a"), {1: 0, "a": 1}),
    ],
)
def test_classes_of_a_training_set(labels, declared, num_labels, names, by_label):
    classes = find_classes(labels, declared, num_labels)
    assert classes.names == names
    assert by_label.items() <= classes.by_label.items()


def test_labels_of_an_evaluation_set():
    classes = find_classes(["0", "2"], (), 4)
    assert [class_of(label, classes) for label in ("2", 2, 3, "4", "x")] == [2, 2, 3, None, None]
    stars = find_classes([1, 5], (), None)
    assert [class_of(label, stars) for label in (1, "5", 0)] == [0, 1, None]


def test_too_few_and_too_many():
    with pytest.raises(ProblemsError, match="the training set has the one label 'a'"):
        find_classes(["a"], (), None)
    with pytest.raises(ProblemsError, match=r"model\.num_labels: 2, but the training set has 3 labels: a, b, c\n"):
        find_classes(["a", "b", "c"], (), 2)
