"""What became of the data: everything that a user should hear about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from allranks.data.formats import Format
from allranks.data.tokens import Int64s

PERCENTILES = (50, 90, 95, 99, 100)

_LISTED = 10
"""Bad samples named in a line; `DataReport.skipped` has them all."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A bad sample.

    Attributes:
        source: name of its set.
        place: ``line 12`` or ``row 12``, from 1.
        reason: why it is no sample.
    """

    source: str
    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SetReport:
    """One set.

    Attributes:
        source: as the user named it.
        samples: that are used.
        truncated: samples that are longer than max_length.
        truncated_tokens: tokens that these lose.
        skipped: samples that are not used.
        percentiles: of the samples' tokens before truncation, by per cent; 100 is the longest.
        cache_hit: the tokens were in the cache.
    """

    source: str
    samples: int
    truncated: int
    truncated_tokens: int
    skipped: tuple[Skipped, ...]
    percentiles: Mapping[int, int]
    cache_hit: bool


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """All sets.

    Attributes:
        format: of the samples.
        max_length: tokens that a sample keeps.
        label_names: of the classes in order; empty for a language model.
        train: the training set.
        eval: the evaluation set, if there is one.
        notes: what else differs from what was asked, one line each.
    """

    format: Format
    max_length: int
    label_names: tuple[str, ...]
    train: SetReport
    eval: SetReport | None
    notes: tuple[str, ...]

    @property
    def sets(self) -> tuple[SetReport, ...]:
        """The sets there are."""
        return (self.train,) if self.eval is None else (self.train, self.eval)

    @property
    def truncated(self) -> int:
        """Truncated samples of all sets."""
        return sum(each.truncated for each in self.sets)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Bad samples of all sets."""
        return tuple(skipped for each in self.sets for skipped in each.skipped)

    def lines(self) -> tuple[str, ...]:
        """What is to be said aloud, one line each."""
        lines = list(self.notes)
        if self.label_names:
            shown = ", ".join(self.label_names[:_LISTED]) + (", …" if len(self.label_names) > _LISTED else "")
            lines.append(f"{len(self.label_names)} classes: {shown}")
        for each in self.sets:
            if each.truncated:
                lines.append(
                    f"{each.source}: {each.truncated:,} of {each.samples:,} samples are longer than "
                    f"{self.max_length:,} tokens and lose {each.truncated_tokens:,} tokens at their end; "
                    f"the longest has {each.percentiles[100]:,}"
                )
            if each.skipped:
                named = "; ".join(f"{skipped.place}: {skipped.reason}" for skipped in each.skipped[:_LISTED])
                more = len(each.skipped) - _LISTED
                more_words = f"; and {more:,} more" if more > 0 else ""
                lines.append(f"{each.source}: {len(each.skipped):,} bad samples skipped: {named}{more_words}")
        return tuple(lines)


def percentiles_of(lengths: Int64s) -> dict[int, int]:
    """Nearest-rank percentiles (a length that occurs, never one between two) of at least one sample."""
    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {per_cent: int(value) for per_cent, value in zip(PERCENTILES, values, strict=True)}
