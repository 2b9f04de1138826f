"""The classes of a classification set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.errors import Problem, ProblemsError


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Which label is which class.

    Attributes:
        names: name of each class, in order.
        by_label: class of each label as it stands in the data.
    """

    names: tuple[str, ...]
    by_label: dict[str | int, int]


def find_classes(labels: Sequence[str | int], declared: tuple[str, ...], num_labels: int | None) -> Classes:
    """The classes behind the labels of a training set.

    Numbers are classes themselves where the set declares its classes, where `num_labels` covers them, or where they
    are 0, 1, … without a gap. Otherwise the classes are the distinct labels, sorted. Numbers written as text, as csv
    files have them, are numbers.

    Args:
        labels: distinct labels.
        declared: names of the classes that the set itself declares, or nothing.
        num_labels: classes that the model is to have, or None.

    Raises:
        ProblemsError: fewer than two classes, or more than `num_labels`.
    """
    numbers = _as_numbers(labels)
    if numbers is None:
        names = tuple(sorted({str(label) for label in labels}))
        by_label = {label: names.index(str(label)) for label in labels}
    else:
        known = declared or tuple(str(number) for number in range(num_labels or len(set(numbers.values()))))
        if all(0 <= number < len(known) for number in numbers.values()):
            names, by_label = known, {**{number: number for number in range(len(known))}, **numbers}
        else:
            ordered = sorted(set(numbers.values()))
            names = tuple(str(number) for number in ordered)
            by_label = {label: ordered.index(number) for label, number in numbers.items()}
    _check(names, num_labels)
    return Classes(names=names, by_label=by_label)


def class_of(label: str | int, classes: Classes) -> int | None:
    """Class of a label of another set, such as the evaluation set; None where the training set has no such label."""
    return {str(known): number for known, number in classes.by_label.items()}.get(str(label))


def _as_numbers(labels: Sequence[str | int]) -> dict[str | int, int] | None:
    """Each label as a number, or None if one of them is none."""
    try:
        numbers: dict[str | int, int] = {label: int(label) for label in labels}
    except ValueError:
        return None
    return numbers if all(str(number) == str(label) for label, number in numbers.items()) else None


def _check(names: tuple[str, ...], num_labels: int | None) -> None:
    if len(names) < 2:
        message = f"the training set has the one label {names[0]!r}"
        fix = "classification needs two or more; look at data.label_column"
        raise ProblemsError("data", [Problem(path="data.label_column", message=message, fix=fix)])
    if num_labels is not None and len(names) > num_labels:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        message = f"{num_labels}, but the training set has {len(names)} labels: {shown}"
        fix = f"set model.num_labels: {len(names)}, or leave it out"
        raise ProblemsError("data", [Problem(path="model.num_labels", message=message, fix=fix)])
