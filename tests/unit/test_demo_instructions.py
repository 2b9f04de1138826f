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


def fields(sample: Instruction) -> dict[str, str]:
    """The lines of the answer, without the signature."""
    return dict(line.split(": ", 1) for line in sample.answer.split("\n")[:-1])


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
        *lines, signature = sample.answer.split("\n")
        assert signature == SIGNATURE
        assert len(fields(sample)) == len(lines) >= 2


def test_a_seed_gives_the_same_bytes_on_every_python(tmp_path: Path) -> None:
    train, evaluation = write_data(tmp_path / "new" / "folder")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in (train, evaluation)]
    assert digests == ["f3121dd7d4b06b0e", "31f5393a4ca453bd"]


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


def test_equations_hold(samples: list[Instruction]) -> None:
    equations = [value for sample in samples for value in fields(sample).values() if "=" in value]
    assert len(equations) > 250
    for equation in equations:
        term, result = re.sub(" (cm|crowns|pieces)$", "", equation).split(" = ")
        assert sum(map(product, term.split(" + "))) == int(result), equation


def product(text: str) -> int:
    result = 1
    for factor in text.split(" x "):
        result *= int(factor)
    return result


def test_equations_are_those_of_the_question(samples: list[Instruction]) -> None:
    for sample in samples:
        numbers = re.findall(r"\d+", sample.question)
        if sample.kind == "length":
            assert fields(sample)["Length"].startswith(f"{numbers[0]} x {numbers[1]} =")
        if sample.kind == "fee":
            adults, adult, children, child = numbers
            results = [fields(sample)[name].split(" = ")[1] for name in ("Adults", "Children")]
            assert fields(sample)["Adults"].startswith(f"{adults} x {adult} =")
            assert fields(sample)["Children"].startswith(f"{children} x {child} =")
            assert fields(sample)["Total"].startswith(" + ".join(results) + " = ")


def test_lookups_are_right(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "where"):
        asked = re.fullmatch(r"Shelf list: (.*)\. Where is the (.*)\?", sample.question)
        assert asked is not None
        shelves = dict(entry.rsplit(" ", 1) for entry in asked.group(1).split("; "))
        assert fields(sample) == {"Piece": asked.group(2), "Shelf": shelves[asked.group(2)]}


def test_orders_are_sorted_permutations(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "order"):
        asked = sample.question.removeprefix("Put these in catalogue order: ").rstrip(".").split(", ")
        assert list(fields(sample).values()) == sorted(asked)


def test_labels_say_what_was_asked(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "label"):
        question = "Write the label of a {Piece} of {Material}, made by {Maker} in {Year}."
        assert sample.question == question.format(**fields(sample))


def test_reports_list_every_entry(samples: list[Instruction]) -> None:
    for sample in (sample for sample in samples if sample.kind == "report"):
        stock = sample.question.split(": ", 1)[1].rstrip(".").split("; ")
        report = fields(sample)
        assert len(report) == len(stock) + 2
        for number, entry in enumerate(stock, start=1):
            piece, shelf = entry.rsplit(" ", 1)
            assert report[f"Entry {number}"] == f"{piece}, shelf {shelf}"
        assert report["Total"].startswith(" + ".join(entry.split()[0] for entry in stock))


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
