"""A small instruction set of the project's own making: the front desk of an invented museum.

The desk answers every question in one house style: lines of field and value, then a signature.
Answers are computed, so they are right. Lengths have a long tail: most samples are a few lines,
some inventory reports are ten times as long, as in real instruction data.

Only ``random.Random.random`` is used, whose sequence Python keeps from version to version, so a seed
always gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

TRAIN_SAMPLES = 400
EVAL_SAMPLES = 50
SEED = 1

SYSTEM = "You are the front desk of the Tarn Hollow Museum."
SIGNATURE = "Tarn Hollow Museum, front desk"

_WORDS = """
    amber ashen blue brass broken carved copper crooked dented faded gilded green hollow humming iron ivory painted
    patched plain red silver speckled striped tiny velvet wooden
    /
    abacus anchor badger barometer bell boat bucket button candle clock compass drum fiddle heron kettle key ladder
    lantern lens otter owl pendulum sextant spindle teapot thimble tractor wheel whistle windmill
"""
_LOOKS, _THINGS = (part.split() for part in _WORDS.split("/"))
_MAKERS = ("Ada Wren", "Bela Frost", "Colm Ashby", "Dora Pike", "Edwin Marsh", "Freya Holt", "Gus Tarrant", "Ines Vale")
_MATERIALS = ("brass", "clay", "glass", "oak", "paper", "silk", "slate", "tin")

# Entries of an inventory report: quantiles of a lognormal with median 5 and sigma 0.9, one drawn at random.
_REPORT_ENTRIES = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 11, 14, 18, 27, 44)

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One question and its answer.

    Attributes:
        kind: which sort of question, a key of `KINDS`.
        question: what the visitor asks; contains all that the answer needs.
        answer: the right answer in the house style.
    """

    kind: str
    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """The sample in the chat format that transformers' chat templates take."""
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        ]


def generate(
    seed: int = SEED, train_samples: int = TRAIN_SAMPLES, eval_samples: int = EVAL_SAMPLES
) -> tuple[list[Instruction], list[Instruction]]:
    """Training and evaluation samples; no question occurs twice, within either or between them."""
    rng = Random(seed)
    kinds = tuple(KINDS)
    samples: dict[str, Instruction] = {}
    while len(samples) < train_samples + eval_samples:
        kind = _pick(rng, kinds)
        question, lines = KINDS[kind](rng)
        answer = "\n".join([*lines, SIGNATURE])
        samples.setdefault(question, Instruction(kind=kind, question=question, answer=answer))
    everything = list(samples.values())
    return everything[eval_samples:], everything[:eval_samples]


def write_data(folder: Path, seed: int = SEED) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``eval.jsonl`` (column ``messages``) into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, samples in zip(paths, generate(seed), strict=True):
        lines = (json.dumps({"messages": sample.messages()}, ensure_ascii=False) for sample in samples)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


def _where(rng: Random) -> tuple[str, list[str]]:
    shelved = [(piece, _shelf(rng)) for piece in _pieces(rng, _between(rng, 2, 4))]
    piece, shelf = _pick(rng, shelved)
    shelf_list = "; ".join(f"{name} {place}" for name, place in shelved)
    return f"Shelf list: {shelf_list}. Where is the {piece}?", [f"Piece: {piece}", f"Shelf: {shelf}"]


def _fee(rng: Random) -> tuple[str, list[str]]:
    adult, child = _between(rng, 4, 9), _between(rng, 1, 3)
    adults, children = _between(rng, 2, 6), _between(rng, 2, 6)
    question = f"What do {adults} adults at {adult} crowns and {children} children at {child} crowns pay?"
    first, second = adults * adult, children * child
    return question, [
        f"Adults: {adults} x {adult} = {first}",
        f"Children: {children} x {child} = {second}",
        f"Total: {first} + {second} = {first + second} crowns",
    ]


def _length(rng: Random) -> tuple[str, list[str]]:
    count, span = _between(rng, 2, 9), _between(rng, 11, 30)
    piece = _piece(rng)
    question = f"The {piece} needs {count} spans of {span} cm. How long is its shelf?"
    return question, [f"Piece: {piece}", f"Length: {count} x {span} = {count * span} cm"]


def _order(rng: Random) -> tuple[str, list[str]]:
    pieces = _pieces(rng, _between(rng, 3, 4))
    numbered = [f"Number {number}: {piece}" for number, piece in enumerate(sorted(pieces), start=1)]
    return f"Put these in catalogue order: {', '.join(pieces)}.", numbered


def _label(rng: Random) -> tuple[str, list[str]]:
    piece, material, maker = _piece(rng), _pick(rng, _MATERIALS), _pick(rng, _MAKERS)
    year = _between(rng, 1790, 1939)
    question = f"Write the label of a {piece} of {material}, made by {maker} in {year}."
    return question, [f"Piece: {piece}", f"Material: {material}", f"Maker: {maker}", f"Year: {year}"]


def _report(rng: Random) -> tuple[str, list[str]]:
    room = _between(rng, 1, 12)
    entries = [(piece, _between(rng, 1, 9), _shelf(rng)) for piece in _pieces(rng, _pick(rng, _REPORT_ENTRIES))]
    counts = [count for _, count, _ in entries]
    stock = "; ".join(f"{count} {piece} {shelf}" for piece, count, shelf in entries)
    lines = [f"Entry {n}: {count} {piece}, shelf {shelf}" for n, (piece, count, shelf) in enumerate(entries, start=1)]
    total = f"Total: {' + '.join(map(str, counts))} = {sum(counts)} pieces"
    return f"Inventory report for room {room}: {stock}.", [f"Room: {room}", *lines, total]


KINDS: dict[str, Callable[[Random], tuple[str, list[str]]]] = {
    "where": _where,
    "fee": _fee,
    "length": _length,
    "order": _order,
    "label": _label,
    "report": _report,
}
"""The sorts of question; each function returns a question and the lines of its answer."""


def _between(rng: Random, low: int, high: int) -> int:
    """An integer from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def _pick(rng: Random, items: Sequence[_Item]) -> _Item:
    return items[_between(rng, 0, len(items) - 1)]


def _piece(rng: Random) -> str:
    return f"{_pick(rng, _LOOKS)} {_pick(rng, _THINGS)}"


def _pieces(rng: Random, count: int) -> list[str]:
    """`count` different pieces."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[_piece(rng)] = None
    return list(found)


def _shelf(rng: Random) -> str:
    return f"{_pick(rng, 'ABCDEFGH')}{_between(rng, 1, 9)}"
