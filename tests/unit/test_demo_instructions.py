"""The demo's data: right, in one style, the same everywhere, with a long tail of lengths."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from allranks.demo import instructions
from allranks.demo.instructions import EVAL_SAMPLES, KINDS, SIGNATURE, Instruction, generate, write_data


@pytest.fixture(scope="module")
def samples() -> list[Instruction]:
    train, evaluation = generate()
    return train + evaluation


def parts(sample: Instruction) -> tuple[list[str], str]:
    """The lines of the working, and the answer."""
    *working, answer, _ = sample.answer.split("\n")
    working[0] = working[0].removeprefix("Work: ")
    return working, answer.removeprefix("Answer: ")


def test_counts_and_no_question_twice() -> None:
    train, evaluation = generate()
    assert len(train) >= 400
    assert len(evaluation) == EVAL_SAMPLES == 50
    assert len({sample.question for sample in train + evaluation}) == len(train) + len(evaluation)


def test_every_kind_is_in_both_sets() -> None:
    for part in generate():
        assert {sample.kind for sample in part} == set(KINDS)


def test_house_style(samples: list[Instruction]) -> None:
    for sample in samples:
        lines = sample.answer.split("\n")
        assert lines[0].startswith("Work: ")
        assert lines[-2].startswith("Answer: ")
        assert lines[-1] == SIGNATURE


def test_a_seed_gives_the_same_bytes_on_every_python(tmp_path: Path) -> None:
    train, evaluation = write_data(tmp_path / "new" / "folder")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in (train, evaluation)]
    assert digests == ["01836c43fb2341be", "a23afdb8ec014316"]


def test_another_seed_gives_other_samples() -> None:
    questions = [{sample.question for sample in generate(seed)[0]} for seed in (1, 2)]
    assert len(questions[0] & questions[1]) < 40


def test_files_are_chat_samples(tmp_path: Path) -> None:
    train, _ = write_data(tmp_path)
    lines = train.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(generate()[0])
    for line in lines:
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert all(message["content"].strip() for message in messages)


def test_arithmetic_is_right(samples: list[Instruction]) -> None:
    """Each chain of equations in a working holds, and its result is the answer's number."""
    seen = 0
    for sample in samples:
        working, answer = parts(sample)
        if "=" not in working[-1]:
            continue
        values = [sum(map(product, side.split("+"))) for side in working[-1].split("=")]
        assert len(set(values)) == 1, working
        assert answer.split()[0] == str(values[0])
        seen += 1
    assert seen > 150


def product(text: str) -> int:
    result = 1
    for factor in text.split("x"):
        result *= int(factor)
    return result


def test_equations_are_those_of_the_question(samples: list[Instruction]) -> None:
    for sample in samples:
        numbers = re.findall(r"\d+", sample.question)
        if sample.kind == "length":
            assert parts(sample)[0][0].startswith(f"{numbers[1]} x {numbers[0]} =")
        if sample.kind == "fee":
            adult, child, adults, children = numbers
            assert parts(sample)[0][0].startswith(f"{adults} x {adult} + {children} x {child} =")


def test_lookups_are_right(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "where"):
        asked = re.fullmatch(r"Shelf list: (.*)\. Where is the (.*)\?", sample.question)
        assert asked is not None
        shelves = dict(entry.rsplit(" ", 1) for entry in asked.group(1).split("; "))
        assert parts(sample) == ([f"{asked.group(2)} {shelves[asked.group(2)]}"], f"shelf {shelves[asked.group(2)]}")


def test_orders_are_sorted_permutations(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "order"):
        asked = sample.question.removeprefix("Put these in catalogue order: ").rstrip(".").split(", ")
        assert parts(sample)[1].split(", ") == sorted(asked)


def test_reports_list_every_entry(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "report"):
        stock = sample.question.split(": ", 1)[1].rstrip(".").split("; ")
        [_, *lines, _], answer = parts(sample)
        for number, (entry, line) in enumerate(zip(stock, lines, strict=True), start=1):
            fields = re.fullmatch(r"(\d+) (.*) (\w\d)", entry)
            assert fields is not None
            assert line == f"{number}. {fields.group(2)}, shelf {fields.group(3)}: {fields.group(1)}"
        assert answer == f"{sum(int(entry.split()[0]) for entry in stock)} pieces"


def test_only_the_stable_source_of_randomness_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyRandom:
        def __init__(self, seed: int) -> None:
            self.random = instructions_random(seed).random

    instructions_random = instructions.Random
    expected = generate()
    monkeypatch.setattr(instructions, "Random", OnlyRandom)
    assert generate() == expected


@pytest.mark.slow
def test_lengths_have_a_long_tail(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_dir)
    train, _ = generate()
    lengths = sorted(len(tokenizer.apply_chat_template(s.messages(), return_dict=True)["input_ids"]) for s in train)
    median = lengths[len(lengths) // 2]
    assert 60 <= median <= 120
    assert sum(length >= 10 * median for length in lengths) >= 3
    assert sum(length >= 3 * median for length in lengths) >= 15
    assert lengths[-1] <= 2048
