"""Short answers: the part of a sample that a model should give word for word, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allranks.data.collate import pad_batch
from allranks.data.tokens import IGNORED_LABEL, Tokens


@dataclass(frozen=True, kw_only=True)
class ShortAnswer:
    """A sample as question and answer.

    Attributes:
        prompt: token ids of all that stands before the answer.
        ids: token ids of the answer, without the tokens that end it.
        ends: tokens that end it, such as the EOS or a template's end of turn.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    ends: frozenset[int]

    def text(self, tokenizer: Any) -> str:
        """The answer without white space around it."""
        return _text(tokenizer, self.ids)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that are no text."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def short_answer(sample: Tokens, special: frozenset[int], most_tokens: int) -> ShortAnswer | None:
    """The last run of targets in `sample`: its completion, or the last turn of the assistant's.

    Args:
        sample: whole, with targets in the answer only.
        special: `special_ids`.
        most_tokens: longest answer, without the tokens that end it.

    Returns:
        None if the answer is longer, or empty, or nothing stands before it.
    """
    stop = len(sample.labels)
    while stop > 0 and sample.labels[stop - 1] == IGNORED_LABEL:
        stop -= 1
    first = stop
    while first > 0 and sample.labels[first - 1] != IGNORED_LABEL:
        first -= 1
    end = stop
    while end > first and sample.input_ids[end - 1] in special:
        end -= 1
    if first == 0 or not 0 < end - first <= most_tokens:
        return None
    # A template's own marks may leave the end of the turn outside of the targets.
    return ShortAnswer(
        prompt=tuple(sample.input_ids[:first]),
        ids=tuple(sample.input_ids[first:end]),
        ends=frozenset(sample.input_ids[end : stop + 1]) & special,
    )


def greedy_answers(model: Any, tokenizer: Any, asked: Sequence[ShortAnswer], device: torch.device) -> list[str]:
    """What the language model `model` answers to each prompt, always taking the likeliest token.

    Answers run one token past the longest of those expected: whatever goes on by then is another answer.
    """
    from transformers import GenerationConfig

    ends = frozenset[int]().union(*(answer.ends for answer in asked))
    if tokenizer.eos_token_id is not None:
        ends |= {tokenizer.eos_token_id}
    # In the place of the model's own, whose repetition penalty or temperature would count too.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(len(answer.ids) for answer in asked) + 1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends) or None,
        use_cache=True,
    )
    prompts = [Tokens(input_ids=list(a.prompt), labels=[IGNORED_LABEL] * len(a.prompt)) for a in asked]
    batch = pad_batch(prompts, tokenizer.pad_token_id, padding_side="left")
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    new = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist()
    return [_text(tokenizer, _before(ids, ends)) for ids in new]


def _before(ids: Sequence[int], ends: frozenset[int]) -> Sequence[int]:
    return ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids))]


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text.strip()
