"""`prepare`: from files to tokenised sets, and everything that is said on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from allranks.config.schema import DataConfig
from allranks.data.prepare import DataRequest, PreparedData, prepare
from allranks.data.tokens import FlatTokens, token_set, truncated_targets
from allranks.errors import ProblemsError

REAL_DATA = Path(__file__).resolve().parents[2].parent / "shared/data"


@pytest.fixture
def prepared(tiny_tokenizer: Any, tmp_path: Path) -> Any:
    """Prepare in a cache of the test's own; one token is one byte."""

    def run(
        train: Path | str, task: Any = "causal-lm", progress: Any = None, num_labels: int | None = None, **keys: Any
    ) -> PreparedData:
        model_max_length = keys.pop("model_max_length", None)
        request = DataRequest(
            data=DataConfig(train=str(train), **keys),
            task=task,
            model_max_length=model_max_length,
            num_labels=num_labels,
        )
        return prepare(request, tiny_tokenizer, cache_dir=tmp_path / "cache", progress=progress)

    return run


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def pairs(lengths: list[int]) -> list[dict[str, str]]:
    """Samples of a prompt of 1 token, a completion and the EOS, of `lengths` tokens in all."""
    return [{"prompt": "p", "completion": "c" * (length - 2)} for length in lengths]


def test_samples_tokens_and_targets(prepared, tiny_tokenizer, tmp_path):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "", "completion": "x"}]
    data = prepared(jsonl(tmp_path / "t.jsonl", rows), max_length=8)
    assert len(data.train) == 2
    first = data.train[0]
    assert tiny_tokenizer.decode(first.input_ids) == "abcd<|im_end|>"
    assert first.labels == [-100, -100, *first.input_ids[2:]]
    assert data.train.lengths.tolist() == [5, 2]
    assert data.train.n_targets.tolist() == [3, 1], "nothing predicts the first token of the second sample"
    assert data.train.source_rows.tolist() == [1, 2]
    assert data.report.lines() == ("format prompt-completion, found from the columns prompt and completion",)


def test_max_length_is_the_95th_percentile(prepared, tmp_path):
    lengths = [*range(20, 115), 200, 300, 400, 500, 1000]
    data = prepared(jsonl(tmp_path / "t.jsonl", pairs(lengths)))
    assert data.report.max_length == 200, "the 96th of 100 lengths, a multiple of 8"
    assert data.report.train.percentiles == {50: 70, 90: 110, 95: 200, 99: 500 + 500, 100: 1000}
    assert (data.report.truncated, data.report.train.truncated_tokens) == (4, 100 + 200 + 300 + 800)
    assert data.train.lengths.tolist() == [min(length, 200) for length in lengths]
    assert len(data.train[99].input_ids) == 200
    _, word, cut = data.report.lines()
    assert word == "max_length 200: the 95th percentile of the training set is 200 tokens"
    assert "t.jsonl: 4 of 100 samples are longer than 200 tokens and lose 1,400 tokens at their end" in cut
    assert cut.endswith("the longest has 1,000")


def test_max_length_is_rounded_up_and_capped(prepared, tmp_path):
    path = jsonl(tmp_path / "t.jsonl", pairs([33] * 5))
    assert prepared(path).report.max_length == 40
    capped = prepared(path, max_length_cap=20).report
    assert capped.max_length == 20
    assert "max_length is 20 and not 40, because of data.max_length_cap 20" in capped.lines()
    model = prepared(path, model_max_length=12).report
    assert model.max_length == 12
    assert "max_length is 12 and not 40, because of the model's 12 positions" in model.lines()
    asked = prepared(path, max_length=64, max_length_cap=24).report
    assert "max_length is 24 and not 64, because of data.max_length_cap 24" in asked.lines()


def test_the_evaluation_set_has_the_training_sets_max_length_and_format(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", pairs([10] * 4))
    evaluation = jsonl(tmp_path / "e.jsonl", [{**row, "text": "more"} for row in pairs([8, 40])])
    data = prepared(train, eval=str(evaluation))
    assert data.eval is not None
    assert data.report.max_length == 16
    assert data.eval.lengths.tolist() == [8, 16]
    assert (data.report.eval.truncated, data.report.eval.truncated_tokens) == (1, 24)


BAD_ROWS = [
    {"prompt": "p", "completion": "good"},
    "",
    {"prompt": "p", "completion": " "},
    {"prompt": "p" * 30, "completion": "c"},
    {"prompt": "p"},
    "[]",
    {"prompt": "p", "completion": "good"},
]


def test_bad_samples_are_listed_and_skipped(prepared, tmp_path):
    data = prepared(jsonl(tmp_path / "t.jsonl", BAD_ROWS), max_length=16)
    assert [(skipped.place, skipped.reason) for skipped in data.report.skipped] == [
        ("line 2", "blank line"),
        ("line 3", "completion is empty"),
        ("line 4", "all its targets lie beyond max_length 16"),
        ("line 5", "no field 'completion'"),
        ("line 6", "a JSON list where an object with the columns is expected"),
    ]
    assert data.train.source_rows.tolist() == [1, 7]
    assert data.report.train.samples == 2
    assert data.report.lines()[-1].startswith(
        f"{tmp_path}/t.jsonl: 5 bad samples skipped: line 2: blank line; line 3: "
    )


def test_bad_samples_are_refused_all_together(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", BAD_ROWS)
    evaluation = jsonl(tmp_path / "e.jsonl", BAD_ROWS[:1] + [{"prompt": 1}] * 30)
    with pytest.raises(ProblemsError) as caught:
        prepared(train, eval=str(evaluation), max_length=16, on_bad_sample="refuse")
    text = str(caught.value)
    assert "data: 21 problems" in text
    assert "t.jsonl, line 3: completion is empty" in text
    assert "e.jsonl, line 2: no field 'completion'" in text
    assert "data: 15 more bad samples" in text
    assert "fix: mend them, or set data.on_bad_sample: skip" in text
    assert prepared(train, max_length=64, max_samples=1, on_bad_sample="refuse").report.skipped == ()


def test_nothing_but_bad_samples(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": "p", "completion": ""}] * 5)
    with pytest.raises(ProblemsError) as caught:
        prepared(train)
    assert "none of its 5 samples can be used: line 1: completion is empty; " in str(caught.value)
    assert "and 2 more" in str(caught.value)
    text = jsonl(tmp_path / "one.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ProblemsError, match="line 1: no token is a target"):
        prepared(text)


def test_corrupt_lines_stop_with_file_and_line(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", [*pairs([9] * 2000), '{"prompt": "p", "compl'])
    with pytest.raises(ProblemsError, match=r"t\.jsonl:2001: not valid JSON: Unterminated string"):
        prepared(train)
    assert not list((tmp_path / "cache/tokens").iterdir()), "a broken set leaves nothing in the cache"


def test_faults_of_both_sets_come_together(prepared, tmp_path):
    with pytest.raises(ProblemsError) as caught:
        prepared(tmp_path / "a.jsonl", eval=str(tmp_path / "b.jsonl"))
    assert "data.train: there is no file" in str(caught.value)
    assert "data.eval: there is no file" in str(caught.value)


def test_the_second_time_the_tokens_come_from_the_cache(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", pairs([9] * 2500))
    seen: list[tuple[int, int]] = []
    first = prepared(train, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1000, 2500), (2000, 2500), (2500, 2500)]
    seen.clear()
    moved = train.rename(tmp_path / "moved.jsonl")
    second = prepared(moved, progress=lambda done, total: seen.append((done, total)))
    assert seen == []
    assert (first.report.train.cache_hit, second.report.train.cache_hit) == (False, True)
    assert second.train.fingerprint == first.train.fingerprint
    assert second.train[3] == first.train[3]
    assert second.report.lines() == first.report.lines()


@pytest.mark.parametrize(
    "keys", [{"completion_only_loss": False}, {"format": "text", "text_column": "prompt"}, {"max_samples": 3}]
)
def test_other_settings_are_other_tokens(prepared, tmp_path, keys):
    train = jsonl(tmp_path / "t.jsonl", pairs([9] * 5))
    first = prepared(train)
    second = prepared(train, **keys)
    assert not second.report.train.cache_hit
    assert second.train.fingerprint != first.train.fingerprint
    assert prepared(train).report.train.cache_hit


def test_max_length_changes_the_fingerprint_but_not_the_cache(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", pairs([9, 12]))
    whole = prepared(train, max_length=64)
    cut = prepared(train, max_length=10)
    assert cut.report.train.cache_hit
    assert cut.train.fingerprint != whole.train.fingerprint
    assert prepared(train, max_length=32).train.fingerprint == whole.train.fingerprint, "nothing is cut at either"


def test_a_damaged_cache_is_made_anew_with_a_word(prepared, tmp_path):
    train = jsonl(tmp_path / "t.jsonl", pairs([9] * 5))
    first = prepared(train)
    [entry] = (tmp_path / "cache/tokens").iterdir()
    (entry / "ids").write_bytes(b"")
    again = prepared(train)
    assert f"the cached tokens of {train} are damaged (ids is damaged): tokenised again" in again.report.lines()
    assert again.train.fingerprint == first.train.fingerprint
    assert prepared(train).report.train.cache_hit


def test_classification(prepared, tmp_path):
    train = tmp_path / "t.csv"
    train.write_text("text,label\naa,no\nbbbb,yes\nc,no\n")
    evaluation = tmp_path / "e.csv"
    evaluation.write_text("text,label\naa,yes\nb,perhaps\n")
    data = prepared(train, "sequence-classification", eval=str(evaluation), max_length=8)
    assert data.report.label_names == ("no", "yes")
    assert [data.train[number].labels for number in range(3)] == [[0], [1], [0]]
    assert data.train.n_targets.tolist() == [1, 1, 1]
    assert data.eval is not None
    assert data.eval[0].labels == [1]
    assert [(skipped.place, skipped.reason) for skipped in data.report.skipped] == [
        ("line 3", "label 'perhaps' is none of the training set's 2")
    ]
    assert "2 classes: no, yes" in data.report.lines()
    with pytest.raises(ProblemsError, match=r"model\.num_labels: 1, but the training set has 2 labels: perhaps, yes"):
        prepared(evaluation.rename(tmp_path / "t3.csv"), "sequence-classification", num_labels=1)


def test_saved_sets_and_their_declared_classes(prepared, tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "fair", "good"])}
    )
    rows = {"text": ["a", "b", ""], "label": [2, 0, 0]}
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    data = prepared(saved, "sequence-classification", eval=saved)
    assert data.report.label_names == ("bad", "fair", "good")
    assert [data.train[number].labels for number in range(2)] == [[2], [0]]
    assert [skipped.place for skipped in data.report.skipped] == ["row 3", "row 3"]
    assert prepared(saved, "sequence-classification").report.train.cache_hit


def test_parquet_chat(prepared, tiny_tokenizer, tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    datasets.Dataset.from_dict({"messages": [messages] * 3, "id": [1, 2, 3]}).to_parquet(tmp_path / "t.parquet")
    data = prepared(tmp_path / "t.parquet")
    assert data.report.format == "chat"
    targets = [token for token in data.train[2].labels if token != -100]
    assert tiny_tokenizer.decode(targets) == "yes<|im_end|>"


def test_a_tokenizer_without_eos_is_said(tiny_tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    train = jsonl(tmp_path / "t.jsonl", pairs([9] * 2))
    request = DataRequest(data=DataConfig(train=str(train)), task="causal-lm")
    for _ in range(2):
        report = prepare(request, bare, cache_dir=tmp_path / "cache").report
        assert "the tokenizer has no EOS token: the model is not taught where a text ends" in report.lines()


def flat(lengths: list[int], targets: list[int]) -> FlatTokens:
    tokens = sum(lengths)
    return FlatTokens(
        ids=np.arange(tokens, dtype=np.int32),
        targets=np.array(targets, dtype=np.uint8),
        lengths=np.array(lengths, dtype=np.int64),
        rows=np.arange(len(lengths), dtype=np.int64) + 1,
        labels=None,
        content="content",
    )


def test_targets_are_counted_shifted_and_within_max_length(monkeypatch):
    whole = flat([1, 3, 4], [1, 0, 1, 1, 1, 1, 1, 1])
    assert truncated_targets(whole, 100).tolist() == [0, 2, 3]
    assert truncated_targets(whole, 2).tolist() == [0, 1, 1]
    assert truncated_targets(whole, 1).tolist() == [0, 0, 0]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 500).tolist()
    many = flat(lengths, rng.integers(0, 2, sum(lengths)).tolist())
    at_once = truncated_targets(many, 6)
    monkeypatch.setattr("allranks.data.tokens._BLOCK", 7)
    assert truncated_targets(many, 6).tolist() == at_once.tolist()
    starts = np.cumsum(lengths) - lengths
    by_hand = [
        int(many.targets[start + 1 : start + min(length, 6)].sum())
        for start, length in zip(starts.tolist(), lengths, strict=True)
    ]
    assert at_once.tolist() == by_hand


def test_the_fingerprint_of_a_set_is_its_content():
    whole = flat([3, 4], [1] * 7)
    counts = truncated_targets(whole, 8)

    def fingerprint(of: FlatTokens = whole, max_length: int = 8, keep: tuple[int, ...] = (0, 1)) -> str:
        kept = np.array(keep, dtype=np.int64)
        return token_set(of, max_length=max_length, keep=kept, n_targets=counts, classes=None).fingerprint

    moved = replace(whole, rows=whole.rows + 5)
    assert fingerprint(moved) == fingerprint()
    others = {
        fingerprint(max_length=3),
        fingerprint(keep=(0,)),
        fingerprint(keep=(1,)),
        fingerprint(replace(whole, content="other")),
    }
    assert len(others | {fingerprint()}) == 5


def real(name: str) -> str:
    if not (REAL_DATA / name).exists():
        pytest.skip(f"{name} is not at {REAL_DATA}")
    return str(REAL_DATA / name)


def test_gsm8k(prepared):
    data = prepared(real("gsm8k_test.jsonl"), prompt_column="question", completion_column="answer")
    assert len(data.train) == 1319
    assert data.report.skipped == ()
    assert 0 < data.report.truncated <= 0.05 * 1319
    assert data.report.max_length % 8 == 0


def test_banking77(prepared):
    data = prepared(real("banking77_test.csv"), "sequence-classification", label_column="category")
    assert len(data.train) == 3080
    assert len(data.report.label_names) == 77
    assert data.report.label_names == tuple(sorted(data.report.label_names))
    assert {data.train[number].labels[0] for number in range(3080)} == set(range(77))
