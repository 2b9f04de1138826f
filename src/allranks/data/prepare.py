"""From the `data` section of the configuration to tokenised sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from allranks.config.schema import DataConfig
from allranks.data.cache import CachedSet, EntryWriter, default_cache_dir, entry_dir, read_entry
from allranks.data.formats import BadSampleError, Format, Sample, Task, columns_of, find_format, sample_of
from allranks.data.labels import Classes, class_of, find_classes
from allranks.data.report import DataReport, SetReport, Skipped, percentiles_of
from allranks.data.sources import Source, open_source
from allranks.data.tokenise import Encoded, SampleTokeniser, tokenizer_fingerprint
from allranks.data.tokens import Int64s, TokenSet, token_set, truncated_targets
from allranks.errors import Problem, ProblemsError

Progress = Callable[[int, int], None]
"""Told the rows tokenised so far and an upper bound of all rows of the set."""

_ROWS_AT_ONCE = 1000
_LISTED = 20
"""Bad samples named in an error."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What is to be prepared.

    Attributes:
        data: the configuration's section.
        task: of the model.
        model_max_length: tokens that the model takes (max_position_embeddings), if known.
        num_labels: classes that the model is to have, if given.
    """

    data: DataConfig
    task: Task
    model_max_length: int | None = None
    num_labels: int | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The tokenised sets and what is to be said of them."""

    train: TokenSet
    eval: TokenSet | None
    report: DataReport


def prepare(
    request: DataRequest, tokenizer: Any, cache_dir: Path | None = None, progress: Progress | None = None
) -> PreparedData:
    """Tokenise the sets of `request`, or find them in the cache.

    Of several ranks that share a cache one should come first; the others then only read.

    Args:
        tokenizer: a transformers tokenizer.
        cache_dir: default `default_cache_dir()`.
        progress: called as rows are tokenised.

    Raises:
        ProblemsError: a set is missing, empty, corrupt or of no known format, has bad samples that are refused or
            nothing but bad samples; or the cache can't be written.
    """
    sources = _open(request.data)
    build = _Build(
        request=request,
        tokenizer=tokenizer,
        tokens_by=tokenizer_fingerprint(tokenizer),
        cache_dir=cache_dir or default_cache_dir(),
        progress=progress,
    )
    train = build.tokenised(sources[0], request.data, request.data.max_samples)
    # The evaluation set is read as the training set was, whatever its other columns.
    like_train = request.data.model_copy(update={"format": train.entry.format})
    others = [build.tokenised(source, like_train, None) for source in sources[1:]]
    classes = _classes(request, train)
    max_length, word = _max_length(request, train.entry.flat.lengths)
    uses = [_use(each, max_length, classes) for each in (train, *others)]
    if request.data.on_bad_sample == "refuse":
        _refuse([skipped for use in uses for skipped in use.report.skipped])
    found = cast(Format, train.entry.format)
    return PreparedData(
        train=uses[0].tokens,
        eval=uses[1].tokens if others else None,
        report=DataReport(
            format=found,
            max_length=max_length,
            label_names=() if classes is None else classes.names,
            train=uses[0].report,
            eval=uses[1].report if others else None,
            notes=(
                *_format_notes(request.data, found, tokenizer),
                *(note for each in (train, *others) for note in each.notes),
                *word,
            ),
        ),
    )


def _open(data: DataConfig) -> list[Source]:
    """The training set and, if there is one, the evaluation set; the faults of both come together."""
    wanted = [("train", data.train, data.train_split)]
    if data.eval is not None:
        wanted.append(("eval", data.eval, data.eval_split))
    sources: list[Source] = []
    problems: list[Problem] = []
    for key, name, split in wanted:
        try:
            sources.append(open_source(name, split=split, key=f"data.{key}"))
        except ProblemsError as error:
            problems.extend(error.problems)
    if problems:
        raise ProblemsError("data", problems)
    return sources


@dataclass(frozen=True, kw_only=True)
class _Tokenised:
    source: Source
    entry: CachedSet
    cache_hit: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Build:
    request: DataRequest
    tokenizer: Any
    tokens_by: str
    cache_dir: Path
    progress: Progress | None

    def tokenised(self, source: Source, data: DataConfig, max_rows: int | None) -> _Tokenised:
        """The tokens of `source`, from the cache or made now."""
        folder = entry_dir(
            self.cache_dir,
            {
                "content": source.content,
                "ending": Path(source.name).suffix,
                "tokenizer": self.tokens_by,
                "task": self.request.task,
                "max_rows": max_rows,
                "completion_only_loss": data.completion_only_loss,
                "format": data.format,
                "columns": {key: value for key, value in data.model_dump().items() if key.endswith("_column")},
            },
        )
        notes: tuple[str, ...] = ()
        try:
            entry = read_entry(folder)
        except ValueError as error:
            entry, notes = None, (f"the cached tokens of {source.name} are damaged ({error}): tokenised again",)
        hit = entry is not None
        if entry is None:
            found = find_format(source.columns, data, self.request.task, source=source.name)
            writer = EntryWriter(folder)
            try:
                self._write(writer, source, found, max_rows)
                entry = writer.commit(found)
            finally:
                writer.abandon()
        return _Tokenised(source=source, entry=entry, cache_hit=hit, notes=notes)

    def _write(self, writer: EntryWriter, source: Source, found: Format, max_rows: int | None) -> None:
        tokenise = SampleTokeniser(self.tokenizer, self.request.data.completion_only_loss)
        rows = islice(source.rows(columns_of(found, self.request.data)), max_rows)
        total, done = min(source.size, max_rows or source.size), 0
        while block := list(islice(rows, _ROWS_AT_ONCE)):
            samples: list[Sample] = []
            places: list[int] = []
            for place, row in block:
                try:
                    samples.append(sample_of(row, found, self.request.data))
                    places.append(place)
                except BadSampleError as bad:
                    writer.add_bad(place, str(bad))
            good: list[tuple[int, Encoded]] = []
            for place, encoded in zip(places, tokenise(samples), strict=True):
                if isinstance(encoded, BadSampleError):
                    writer.add_bad(place, str(encoded))
                else:
                    good.append((place, encoded))
            writer.add(
                rows=[place for place, _ in good],
                ids=[encoded.ids for _, encoded in good],
                targets=[encoded.targets for _, encoded in good],
                labels=[encoded.label for _, encoded in good],
            )
            done += len(block)
            if self.progress is not None:
                self.progress(done, total)


def _format_notes(data: DataConfig, found: Format, tokenizer: Any) -> list[str]:
    notes = []
    if data.format == "auto":
        notes.append(f"format {found}, found from the columns {' and '.join(columns_of(found, data))}")
    if found in ("prompt-completion", "text") and tokenizer.eos_token_id is None:
        notes.append("the tokenizer has no EOS token: the model is not taught where a text ends")
    return notes


def _classes(request: DataRequest, train: _Tokenised) -> Classes | None:
    if request.task != "sequence-classification" or not train.entry.raw_labels:
        return None
    declared = train.source.class_names.get(request.data.label_column, ())
    return find_classes(train.entry.raw_labels, declared, request.num_labels)


def _max_length(request: DataRequest, lengths: Int64s) -> tuple[int, tuple[str, ...]]:
    """Tokens that a sample keeps, and what is to be said of it."""
    asked = request.data.max_length
    limit = request.data.max_length_cap
    limited_by = f"data.max_length_cap {limit:,}"
    if request.model_max_length is not None and request.model_max_length < limit:
        limit, limited_by = request.model_max_length, f"the model's {request.model_max_length:,} positions"
    words = []
    if asked == "auto":
        per_cent_95 = percentiles_of(lengths)[95] if len(lengths) else 8
        wanted = -(-per_cent_95 // 8) * 8
        words.append(
            f"max_length {min(wanted, limit):,}: the 95th percentile of the training set is {per_cent_95:,} tokens"
        )
    else:
        wanted = asked
    if wanted > limit:
        words.append(f"max_length is {limit:,} and not {wanted:,}, because of {limited_by}")
    return min(wanted, limit), tuple(words)


@dataclass(frozen=True, kw_only=True)
class _Use:
    tokens: TokenSet
    report: SetReport


def _use(each: _Tokenised, max_length: int, classes: Classes | None) -> _Use:
    """The samples of a set that can be used at `max_length`.

    Raises:
        ProblemsError: there is none.
    """
    flat, bad = each.entry.flat, list(each.entry.bad)
    of_label: Int64s | None = None
    if classes is None or flat.labels is None:
        n_targets = truncated_targets(flat, max_length)
        whole = n_targets if n_targets.all() else truncated_targets(flat, int(flat.lengths.max()))
        for index in np.flatnonzero(n_targets == 0).tolist():
            cut = f"all its targets lie beyond max_length {max_length}" if whole[index] else "no token is a target"
            bad.append((int(flat.rows[index]), cut))
    else:
        by_raw = [class_of(label, classes) for label in each.entry.raw_labels]
        of_label = np.array([-1 if found is None else found for found in by_raw], dtype=np.int64)[flat.labels]
        n_targets = (of_label >= 0).astype(np.int64)
        for index in np.flatnonzero(of_label < 0).tolist():
            label = each.entry.raw_labels[int(flat.labels[index])]
            bad.append((int(flat.rows[index]), f"label {label!r} is none of the training set's {len(classes.names)}"))
    skipped = tuple(
        Skipped(source=each.source.name, place=f"{each.source.unit} {row}", reason=reason)
        for row, reason in sorted(bad)
    )
    keep = np.flatnonzero(n_targets > 0)
    if len(keep) == 0:
        _none_left(each, skipped)
    beyond = flat.lengths[keep] - max_length
    return _Use(
        tokens=token_set(flat, max_length=max_length, keep=keep, n_targets=n_targets, classes=of_label),
        report=SetReport(
            source=each.source.name,
            samples=len(keep),
            truncated=int((beyond > 0).sum()),
            truncated_tokens=int(beyond[beyond > 0].sum()),
            skipped=skipped,
            percentiles=percentiles_of(flat.lengths[keep]),
            cache_hit=each.cache_hit,
        ),
    )


def _none_left(each: _Tokenised, skipped: tuple[Skipped, ...]) -> None:
    reasons = "; ".join(f"{bad.place}: {bad.reason}" for bad in skipped[:3])
    more = f"; and {len(skipped) - 3:,} more" if len(skipped) > 3 else ""
    message = f"none of its {len(skipped):,} samples can be used: {reasons}{more}"
    raise ProblemsError("data", [Problem(path=each.source.name, message=message)])


def _refuse(skipped: list[Skipped]) -> None:
    problems = [Problem(path=f"{bad.source}, {bad.place}", message=bad.reason) for bad in skipped[:_LISTED]]
    if len(skipped) > _LISTED:
        problems.append(Problem(path="data", message=f"{len(skipped) - _LISTED:,} more bad samples"))
    if problems:
        problems[-1] = replace(problems[-1], fix="mend them, or set data.on_bad_sample: skip")
        raise ProblemsError("data", problems)
