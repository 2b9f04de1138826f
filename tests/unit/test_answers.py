"""Short answers: where they are in a sample, and what a model that has learnt them by heart gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.data.formats import Chat, PromptCompletion, Sample
from allranks.data.tokenise import SampleTokeniser
from allranks.data.tokens import IGNORED_LABEL, Tokens
from allranks.train.answers import ShortAnswer, greedy_answers, short_answer, special_ids

END, PAD = 90, 91


def tokens(text: str) -> Tokens:
    """`p` is a token of a prompt, `a` of an answer, `E` an end token that is a target, `e` one that is none."""
    ids = {"p": 1, "a": 2, "E": END, "e": END}
    labels = [ids[letter] if letter in "aE" else IGNORED_LABEL for letter in text]
    return Tokens(input_ids=[ids[letter] for letter in text], labels=labels)


@pytest.mark.parametrize(
    ("text", "prompt", "answer", "ends"),
    [
        ("ppaaE", 2, 2, {END}),
        ("ppaae", 2, 2, {END}),  # a template's own marks leave the end of the turn out
        ("ppaa", 2, 2, set()),
        ("paEppaaaEp", 5, 3, {END}),  # the last turn of several
        ("ppaEa", 2, 3, set()),
    ],
)
def test_where_the_answer_is(text: str, prompt: int, answer: int, ends: set[int]) -> None:
    found = short_answer(tokens(text), frozenset({END, PAD}), 8)
    assert found is not None
    assert (len(found.prompt), len(found.ids), found.ends) == (prompt, answer, ends)


@pytest.mark.parametrize("text", ["ppaaaaE", "aaE", "ppE", "pp"])
def test_no_short_answer(text: str) -> None:
    assert short_answer(tokens(text), frozenset({END}), 3) is None


def test_the_limit_counts_the_answer_without_its_end() -> None:
    assert short_answer(tokens("paaaE"), frozenset({END}), 3) is not None
    assert short_answer(tokens("paaaE"), frozenset({END}), 2) is None


def asked(tokenizer: Any, samples: list[Sample]) -> list[ShortAnswer]:
    found = []
    for encoded in SampleTokeniser(tokenizer, completion_only_loss=True)(samples):
        assert not isinstance(encoded, Exception)
        labels = [i if target else IGNORED_LABEL for i, target in zip(encoded.ids, encoded.targets, strict=True)]
        answer = short_answer(Tokens(input_ids=encoded.ids, labels=labels), special_ids(tokenizer), 32)
        assert answer is not None
        found.append(answer)
    return found


def test_answers_learnt_by_heart(tiny_llama_dir: Path, tiny_tokenizer: Any) -> None:
    """Prompts of unlike lengths in one batch, of both formats; a model's own penalty on repetition is not heard."""
    from transformers import AutoModelForCausalLM

    def chat(question: str, answer: str) -> Chat:
        return Chat(messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    answers = asked(
        tiny_tokenizer,
        [
            PromptCompletion(prompt="a colour: ", completion=" red "),
            PromptCompletion(prompt="n: ", completion="777777"),
            chat("what is the best of all colours?", "blue"),
        ],
    )
    assert [answer.text(tiny_tokenizer) for answer in answers] == ["red", "777777", "blue"]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.generation_config.repetition_penalty = 50.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        for answer in answers:
            ids = torch.tensor([[*answer.prompt, *answer.ids, *sorted(answer.ends)]])
            labels = ids.clone()
            labels[:, : len(answer.prompt)] = IGNORED_LABEL
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    device = torch.device("cpu")
    assert greedy_answers(model, tiny_tokenizer, answers, device) == ["red", "777777", "blue"]
    # A shorter expected answer is not found at the beginning of a longer given one.
    cut = [replace(answers[1], ids=answers[1].ids[:3])]
    assert greedy_answers(model, tiny_tokenizer, cut, device) != [cut[0].text(tiny_tokenizer)]
