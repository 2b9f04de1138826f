"""A tokenised set: token ids and targets of every sample, read from the cache as they are needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100
"""Label of a token that is no target: cross-entropy's ignore_index."""

Int64s = NDArray[np.int64]

_BLOCK = 1 << 16
"""Samples whose targets are counted at once: a running sum over all tokens of a set might not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sample.

    Attributes:
        input_ids: token ids.
        labels: the id where the token is a target, else `IGNORED_LABEL`; not shifted. Of a sample for
            sequence-classification: its class alone.
    """

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenArrays:
    """One sample as a micro-batch takes it: what `Tokens` says, in arrays.

    Attributes:
        input_ids: shape [tokens].
        labels: shape [tokens], or [1].
    """

    input_ids: Int64s
    labels: Int64s


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatTokens:
    """All samples of a set end to end, not truncated.

    Attributes:
        ids: token ids, shape [tokens].
        targets: 1 where the token is a target, shape [tokens].
        lengths: tokens of each sample, shape [samples].
        rows: line or row of each sample in its source, from 1, shape [samples].
        labels: of each sample an index into a list of raw labels, shape [samples]; None without classes.
        content: hash of all of it but `rows`.
    """

    ids: NDArray[np.int32]
    targets: NDArray[np.uint8]
    lengths: Int64s
    rows: Int64s
    labels: Int64s | None
    content: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """The samples that a run uses, truncated; ``set[i]`` is a `Tokens`.

    Attributes:
        fingerprint: of all token ids and labels in order; wherever the set came from, equal content is equal.
        lengths: tokens of each sample, shape [samples].
        n_targets: targets of each sample, at least 1: labelled tokens but for the first, which nothing predicts;
            1 for sequence-classification. Shape [samples].
        source_rows: line or row of each sample in its source, from 1, shape [samples].
    """

    fingerprint: str
    lengths: Int64s
    n_targets: Int64s
    source_rows: Int64s
    _flat: FlatTokens
    _starts: Int64s
    _classes: Int64s | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        sample = self.arrays(index)
        return Tokens(input_ids=sample.input_ids.tolist(), labels=sample.labels.tolist())

    def arrays(self, index: int) -> TokenArrays:
        """A sample, a tenth of the time of ``set[index]``."""
        start = int(self._starts[index])
        here = slice(start, start + int(self.lengths[index]))
        ids = self._flat.ids[here].astype(np.int64)
        if self._classes is not None:
            return TokenArrays(input_ids=ids, labels=self._classes[index : index + 1])
        return TokenArrays(input_ids=ids, labels=np.where(self._flat.targets[here] == 1, ids, IGNORED_LABEL))


def truncated_targets(flat: FlatTokens, max_length: int) -> Int64s:
    """Target tokens of each sample, shape [samples], when only its first `max_length` tokens are kept."""
    counts = np.zeros(len(flat.lengths), dtype=np.int64)
    starts = _starts(flat.lengths)
    for first in range(0, len(counts), _BLOCK):
        block = slice(first, first + _BLOCK)
        begin, lengths = starts[block] - starts[first], flat.lengths[block]
        ends = begin + np.minimum(lengths, max_length)
        targets = flat.targets[starts[first] : starts[first] + lengths.sum()]
        running = np.concatenate(([0], np.cumsum(targets, dtype=np.int64)))
        counts[block] = running[ends] - running[np.minimum(begin + 1, ends)]
    return counts


def token_set(
    flat: FlatTokens, *, max_length: int, keep: Int64s, n_targets: Int64s, classes: Int64s | None
) -> TokenSet:
    """A view of the samples `keep` of `flat`, each cut to its first `max_length` tokens.

    Args:
        keep: indices of samples, rising.
        n_targets: of all samples of `flat`.
        classes: of all samples of `flat`; None for a language model.
    """
    lengths = np.minimum(flat.lengths, max_length)[keep]
    kept_classes = None if classes is None else classes[keep]
    digest = hashlib.sha256(flat.content.encode())
    parts: list[NDArray[Any]] = [keep, lengths] if kept_classes is None else [keep, lengths, kept_classes]
    for part in parts:
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return TokenSet(
        fingerprint=digest.hexdigest(),
        lengths=lengths,
        n_targets=n_targets[keep],
        source_rows=flat.rows[keep],
        _flat=flat,
        _starts=_starts(flat.lengths)[keep],
        _classes=kept_classes,
    )


def _starts(lengths: Int64s) -> Int64s:
    return np.cumsum(lengths) - lengths
