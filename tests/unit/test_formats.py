"""Which format columns have, and what a row must hold."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.config.schema import DataConfig
from allranks.data.formats import (
    BadSampleError,
    Chat,
    Format,
    Labelled,
    Plain,
    PromptCompletion,
    Sample,
    find_format,
    sample_of,
)
from allranks.errors import ProblemsError


def config(**keys: Any) -> DataConfig:
    return DataConfig(train="t.jsonl", **keys)


def found(columns: tuple[str, ...], task: Any = "causal-lm", **keys: Any) -> Format:
    return find_format(columns, config(**keys), task, source="t.jsonl")


def refusal(columns: tuple[str, ...], task: Any = "causal-lm", **keys: Any) -> str:
    with pytest.raises(ProblemsError) as caught:
        found(columns, task, **keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "keys", "expected"),
    [
        (("prompt", "completion", "id"), {}, "prompt-completion"),
        (("question", "answer"), {"prompt_column": "question", "completion_column": "answer"}, "prompt-completion"),
        (("messages",), {}, "chat"),
        (("text", "label"), {}, "text"),
        (("text", "messages"), {"format": "chat"}, "chat"),
    ],
)
def test_the_format_that_the_columns_fit(columns, keys, expected):
    assert found(columns, **keys) == expected


def test_classification_goes_with_its_task():
    assert found(("text", "label"), "sequence-classification") == "classification"
    text = refusal(("text", "label"), format="classification")
    assert "data.format: 'classification' is no format for task causal-lm" in text
    assert "fix: set model.task: sequence-classification" in text
    assert "'chat' has no classes" in refusal(("messages",), "sequence-classification", format="chat")


def test_several_formats_fit():
    text = refusal(("prompt", "completion", "text"))
    assert "the columns of t.jsonl are prompt, completion, text: they fit prompt-completion and text" in text
    assert "valid: prompt-completion, text" in text


def test_no_format_fits():
    text = refusal(("question", "answer"))
    assert "the columns of t.jsonl are question, answer: no format fits" in text
    assert "prompt-completion needs prompt and completion; chat needs messages; text needs text" in text
    assert "data.prompt_column and data.completion_column" in text


def test_every_missing_column_is_named_with_its_key():
    text = refusal(("promt", "output"), format="prompt-completion")
    assert "data: 2 problems" in text
    assert "data.prompt_column: 'prompt' is no column of t.jsonl" in text
    assert "nearest: promt" in text
    assert "data.completion_column: 'completion' is no column" in text
    assert "valid: promt, output" in text
    text = refusal(("text", "category"), "sequence-classification")
    assert "data: 1 problem\n" in text
    assert "data.label_column: 'label' is no column" in text


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


@pytest.mark.parametrize(
    ("row", "form", "sample"),
    [
        ({"prompt": "", "completion": "a"}, "prompt-completion", PromptCompletion(prompt="", completion="a")),
        ({"messages": MESSAGES, "more": 1}, "chat", Chat(messages=MESSAGES)),
        (
            {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
            "prompt-completion",
            Chat(messages=MESSAGES, first_target=1),
        ),
        ({"text": "a"}, "text", Plain(text="a")),
        ({"text": "a", "label": 2}, "classification", Labelled(text="a", label=2)),
        ({"text": "a", "label": "2"}, "classification", Labelled(text="a", label="2")),
        ({"text": "a", "label": 2.0}, "classification", Labelled(text="a", label=2)),
        ({"text": "a", "label": True}, "classification", Labelled(text="a", label="true")),
    ],
)
def test_good_rows(row: object, form: Format, sample: Sample):
    assert sample_of(row, form, config()) == sample


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        (None, "text", "blank line"),
        ([1], "text", "a JSON list where an object"),
        ("a", "text", "a JSON text where an object"),
        ({"body": "a"}, "text", "no field 'text'"),
        ({"text": None}, "text", "text is null"),
        ({"text": 3}, "text", "text is number, not text"),
        ({"text": " \n"}, "text", "text is empty"),
        ({"text": "\ud83d"}, "text", "half of a surrogate pair"),
        ({"prompt": "a", "completion": "  "}, "prompt-completion", "completion is empty"),
        ({"prompt": "a"}, "prompt-completion", "no field 'completion'"),
        ({"prompt": "a", "completion": MESSAGES}, "prompt-completion", "completion is list, not text"),
        ({"messages": "Hi"}, "chat", "messages is text, not a list of messages"),
        ({"messages": []}, "chat", "messages is empty"),
        ({"messages": ["Hi"]}, "chat", "message 1 of messages is text, not an object"),
        (
            {"messages": [MESSAGES[0], {"from": "gpt", "value": "a"}]},
            "chat",
            "message 2 of messages has no role (it has from, value)",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "chat", "content of message 1 is list, not text"),
        ({"messages": [{"role": "user", "content": ""}]}, "chat", "all messages of messages are empty"),
        ({"text": "a", "label": ""}, "classification", "label is empty"),
        ({"text": "a", "label": 0.5}, "classification", "label is 0.5, which is no class"),
        ({"text": "a", "label": None}, "classification", "label is null"),
    ],
)
def test_bad_rows(row: object, form: Format, reason: str):
    with pytest.raises(BadSampleError) as caught:
        sample_of(row, form, config())
    assert reason in str(caught.value)
