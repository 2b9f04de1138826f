"""From samples to token ids and targets, in batches."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.data.formats import BadSampleError, Chat, Labelled, PromptCompletion, Sample
from allranks.errors import Problem, ProblemsError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
"""First character of an assistant turn in the rendered conversation and the one after its last."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tokenised sample, not truncated.

    Attributes:
        ids: token ids.
        targets: for each token, 1 if it is a target, else 0.
        label: of a sample for classification, which has no target tokens.
    """

    ids: list[int]
    targets: list[int]
    label: str | int | None = None


class SampleTokeniser:
    """Tokenises samples.

    - Prompt and completion are tokenised apart, as at inference, where the completion follows the prompt's tokens:
      so no token straddles the boundary. Before the prompt comes what the tokenizer begins with (BOS), once; after
      the completion the EOS, unless the text ends in it.
    - Running text likewise begins with the BOS and ends with the EOS.
    - Conversations are rendered by the tokenizer's chat template and tokenised whole, as at inference.
    - Texts to classify are tokenised with all the special tokens that the tokenizer adds by itself.
    """

    def __init__(self, tokenizer: Any, completion_only_loss: bool) -> None:
        self._tokenizer = tokenizer
        self._completion_only = completion_only_loss
        self._begin = _begin_ids(tokenizer)
        self._turn_ends = _special_tokens(tokenizer)
        template = tokenizer.chat_template
        self._marks_turns = isinstance(template, str) and _GENERATION_TAG.search(template) is not None

    def __call__(self, samples: Sequence[Sample]) -> list[Encoded | BadSampleError]:
        """Tokenise `samples`; for one that can't be, the reason why comes in its place.

        Raises:
            ProblemsError: there is a conversation and the tokenizer has no chat template, or the template does not
                let an assistant's tokens be told apart.
        """
        chats = self._chats([sample for sample in samples if isinstance(sample, Chat)])
        texts = self._texts([sample for sample in samples if not isinstance(sample, Chat)])
        return [next(chats) if isinstance(sample, Chat) else next(texts) for sample in samples]

    def _texts(self, samples: list[Sample]) -> Iterator[Encoded]:
        pieces = [piece for sample in samples for piece in _pieces(sample)]
        if not pieces:
            return
        own_specials = isinstance(samples[0], Labelled)
        ids = iter(self._tokenizer(pieces, add_special_tokens=own_specials, verbose=False)["input_ids"])
        for sample in samples:
            first = next(ids)
            if isinstance(sample, Labelled):
                yield Encoded(ids=first, targets=[0] * len(first), label=sample.label)
            elif isinstance(sample, PromptCompletion):
                prompt, completion = self._begun(first), self._ended(next(ids))
                masked = int(not self._completion_only)
                yield Encoded(ids=prompt + completion, targets=[masked] * len(prompt) + [1] * len(completion))
            else:
                text = self._ended(self._begun(first))
                yield Encoded(ids=text, targets=[1] * len(text))

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._begin)] == self._begin else self._begin + ids

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _chats(self, chats: list[Chat]) -> Iterator[Encoded | BadSampleError]:
        if not chats:
            return
        if self._tokenizer.chat_template is None:
            message = "the tokenizer has no chat template, and the set holds conversations"
            fix = "name a tokenizer that has one, or give prompts and completions as text"
            raise ProblemsError("data", [Problem(path="model.tokenizer_name_or_path", message=message, fix=fix)])
        if self._completion_only and self._marks_turns and not any(chat.first_target for chat in chats):
            yield from (self._marked(chat) for chat in chats)
            return
        rendered = [self._rendered(chat) for chat in chats]
        encoded = self._encoded([each for each in rendered if not isinstance(each, BadSampleError)])
        yield from (each if isinstance(each, BadSampleError) else next(encoded) for each in rendered)

    def _marked(self, chat: Chat) -> Encoded | BadSampleError:
        """A conversation whose template marks the assistant's turns itself, with ``{% generation %}``."""
        try:
            result = self._tokenizer.apply_chat_template(
                chat.messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
        except _template_errors() as error:
            return BadSampleError(f"chat template: {error}")
        return Encoded(ids=result["input_ids"], targets=result["assistant_masks"])

    def _rendered(self, chat: Chat) -> tuple[str, list[Span]] | BadSampleError:
        try:
            text = self._render(chat.messages)
            return text, self._turns(chat, text) if self._completion_only else [(0, len(text) + 1)]
        except _template_errors() as error:
            return BadSampleError(f"chat template: {error}")

    def _turns(self, chat: Chat, text: str) -> list[Span]:
        """Where the assistant's turns are: each is what it adds to the rendering of the messages before it.

        A first message of the assistant's is none, because there is no prompt that it answers.
        """
        spans: list[Span] = []
        for index in range(max(1, chat.first_target), len(chat.messages)):
            if chat.messages[index]["role"] != "assistant":
                continue
            before = self._render(chat.messages[:index], add_generation_prompt=True)
            after = self._render(chat.messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ProblemsError("data", [_NOT_MASKABLE])
            # What a template writes between a turn's end token and the next turn is not the assistant's.
            ended = after.rstrip()
            spans.append((len(before), len(ended) if ended.endswith(self._turn_ends) else len(after)))
        return spans

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _encoded(self, rendered: list[tuple[str, list[Span]]]) -> Iterator[Encoded]:
        """Tokenise whole conversations; a token is a target if it begins inside a span."""
        if not rendered:
            return
        if not self._tokenizer.is_fast:
            message = "this tokenizer does not tell where its tokens lie in the text, which conversations need"
            raise ProblemsError("data", [Problem(path="model.tokenizer_name_or_path", message=message)])
        encoded = self._tokenizer(
            [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for ids, offsets, (_, spans) in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True):
            begins = [begin for begin, _ in offsets]
            targets = [0] * len(ids)
            for first, stop in spans:
                at = bisect_left(begins, first)
                while at < len(ids) and offsets[at][1] <= first:
                    at += 1  # a space before the span, of which some tokenizers report the end alone
                for token in range(at, bisect_left(begins, stop)):
                    targets[token] = 1
            yield Encoded(ids=ids, targets=targets)


_NOT_MASKABLE = Problem(
    path="data.completion_only_loss",
    message="the chat template can't be masked: it renders the first turns otherwise when more turns follow",
    fix="set data.completion_only_loss: false, or use a template with {% generation %} around the assistant's turns",
)


def _pieces(sample: Sample) -> tuple[str, ...]:
    if isinstance(sample, PromptCompletion):
        return sample.prompt, sample.completion
    assert not isinstance(sample, Chat)
    return (sample.text,)


def _begin_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text by itself: the BOS, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    begins = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    return list(whole[: next(begins, 0)])


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def _template_errors() -> tuple[type[Exception], ...]:
    """What a chat template raises about a conversation that it does not take."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, KeyError, ValueError)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of everything that decides the tokens of a text or conversation."""
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        # Padding and truncation are left over from the last call; they are not the tokenizer's own.
        state = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _LEFT_OVER}
    parts = [
        transformers.__version__,
        type(tokenizer).__name__,
        state,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


_LEFT_OVER = ("padding", "truncation")
