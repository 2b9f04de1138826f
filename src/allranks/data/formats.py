"""What a row of a set is: which format its columns have, and the sample that a row holds."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from allranks.config.schema import DataConfig
from allranks.errors import Problem, ProblemsError

Format = Literal["prompt-completion", "chat", "text", "classification"]
Task = Literal["causal-lm", "sequence-classification"]

COLUMN_KEYS: dict[Format, tuple[str, ...]] = {
    "prompt-completion": ("prompt_column", "completion_column"),
    "chat": ("messages_column",),
    "text": ("text_column",),
    "classification": ("text_column", "label_column"),
}
"""The keys under `data` that name the columns of each format."""


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """A prompt and what should follow it; only the completion is a target."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation.

    Attributes:
        messages: each with at least ``role`` and ``content``, as the chat template gets them.
        first_target: index of the first message that may be a target; those before it are a given prompt.
    """

    messages: list[dict[str, Any]]
    first_target: int = 0


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Running text, all of it a target."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A text and its class."""

    text: str
    label: str | int


Sample = PromptCompletion | Chat | Plain | Labelled


class BadSampleError(ValueError):
    """A row that can't be a sample; the message says why."""


def columns_of(found: Format, data: DataConfig) -> tuple[str, ...]:
    """The columns that samples of the format are made from."""
    return tuple(getattr(data, key) for key in COLUMN_KEYS[found])


def find_format(columns: tuple[str, ...], data: DataConfig, task: Task, *, source: str) -> Format:
    """The format that is configured, or the only one that the columns fit.

    Args:
        columns: of the set.
        source: name of the set, for the message.

    Raises:
        ProblemsError: columns are missing, several formats fit or none does, or the format is not the task's.
    """
    if task == "sequence-classification":
        if data.format not in ("auto", "classification"):
            raise _refused("data.format", f"{data.format!r} has no classes for task sequence-classification", fix=_TASK)
        return _with_columns("classification", columns, data, source)
    if data.format == "classification":
        raise _refused("data.format", "'classification' is no format for task causal-lm", fix=_TASK)
    if data.format != "auto":
        return _with_columns(data.format, columns, data, source)
    candidates: tuple[Format, ...] = ("prompt-completion", "chat", "text")
    fitting = [candidate for candidate in candidates if set(columns_of(candidate, data)) <= set(columns)]
    if len(fitting) == 1:
        return fitting[0]
    found = f"the columns of {source} are {', '.join(columns)}"
    if fitting:
        message = f"{found}: they fit {' and '.join(fitting)}"
        raise _refused("data.format", message, choices=tuple(fitting), fix="set data.format to the one that is meant")
    needs = [f"{candidate} needs {' and '.join(columns_of(candidate, data))}" for candidate in candidates]
    fix = "name them in data.prompt_column and data.completion_column, data.messages_column, or data.text_column"
    raise _refused("data.format", f"{found}: no format fits ({'; '.join(needs)})", fix=fix)


_TASK = "set model.task: sequence-classification together with data.format: classification, or neither"


def _with_columns(found: Format, columns: tuple[str, ...], data: DataConfig, source: str) -> Format:
    problems = []
    for key in COLUMN_KEYS[found]:
        column = getattr(data, key)
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            problems.append(
                Problem(
                    path=f"data.{key}",
                    message=f"{column!r} is no column of {source}, and format {found} needs it",
                    choices=columns,
                    nearest=near[0] if near else None,
                    fix=f"set data.{key} to the column that is meant",
                )
            )
    if problems:
        raise ProblemsError("data", problems)
    return found


def _refused(path: str, message: str, **hints: Any) -> ProblemsError:
    return ProblemsError("data", [Problem(path=path, message=message, **hints)])


def sample_of(row: object, found: Format, data: DataConfig) -> Sample:
    """The sample in a row.

    Raises:
        BadSampleError: the row is empty, lacks a field, or has one of the wrong type.
    """
    if row is None:
        raise BadSampleError("blank line")
    if not isinstance(row, dict):
        raise BadSampleError(f"a JSON {_kind(row)} where an object with the columns is expected")
    values = [_field(row, column) for column in columns_of(found, data)]
    if found == "prompt-completion":
        return _prompt_completion(data, *values)
    if found == "chat":
        return Chat(messages=_messages(data.messages_column, values[0]))
    text = _text(data.text_column, values[0])
    if not text.strip():
        raise BadSampleError(f"{data.text_column} is empty")
    return Plain(text=text) if found == "text" else Labelled(text=text, label=_label(data.label_column, values[1]))


def _prompt_completion(data: DataConfig, prompt: object, completion: object) -> Sample:
    if isinstance(prompt, list) and isinstance(completion, list):
        given = _messages(data.prompt_column, prompt)
        return Chat(messages=given + _messages(data.completion_column, completion), first_target=len(given))
    sample = PromptCompletion(
        prompt=_text(data.prompt_column, prompt), completion=_text(data.completion_column, completion)
    )
    if not sample.completion.strip():
        raise BadSampleError(f"{data.completion_column} is empty")
    return sample


def _field(row: dict[str, Any], column: str) -> object:
    if column not in row:
        raise BadSampleError(f"no field {column!r}")
    if row[column] is None:
        raise BadSampleError(f"{column} is null")
    return row[column]


def _text(column: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadSampleError(f"{column} is {_kind(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadSampleError(f"{column} holds half of a surrogate pair, which is no character") from None
    return value


def _messages(column: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadSampleError(f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        raise BadSampleError(f"{column} is empty")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise BadSampleError(f"message {number} of {column} is {_kind(message)}, not an object")
        for name in ("role", "content"):
            if message.get(name) is None:
                has = ", ".join(str(key) for key in message) or "nothing"
                raise BadSampleError(f"message {number} of {column} has no {name} (it has {has})")
            _text(f"{name} of message {number}", message[name])
    if not any(message["content"].strip() for message in value):
        raise BadSampleError(f"all messages of {column} are empty")
    return value


def _label(column: str, value: object) -> str | int:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        raise BadSampleError(f"{column} is {value}, which is no class")
    label = _text(column, value)
    if not label.strip():
        raise BadSampleError(f"{column} is empty")
    return label


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true or false", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
