"""Rules of a sample's prompt: LongBench's truncation, prompts in token ids, system turns, and the answer's ids."""

from __future__ import annotations

import string
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import DataError, ModelError
from kvbench.models.load import byte_tokenizer
from kvbench.runner.prompting import EncodedPrompt, answer_ids, encode_prompt, end_ids, pad, prompt_limit, wrapper
from kvbench.tasks.base import PromptRules, Sample

TEXT = string.ascii_letters + string.digits[:8]  # 60 characters, each of them once


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def sample(**changes: Any) -> Sample:
    parts = {"id": "toy/0", "task": "toy", "prompt": TEXT, "answers": ("1",), "max_new_tokens": 4}
    return Sample(**parts | changes)


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def longbench(tokenizer, limit: int, room: int | None = None, chat: str = "none", **changes: Any) -> EncodedPrompt:
    return encode_prompt(sample(truncation="longbench", **changes), tokenizer, chat=chat, limit=limit, room=room)


def test_longbenchs_limit_does_not_count_the_wrapper(tokenizer) -> None:
    prompt = longbench(tokenizer, 20, chat="<<{prompt}>>")
    # the first ten tokens are BOS and nine characters
    assert text_of(tokenizer, prompt.ids) == f"<<{TEXT[:9]}{TEXT[-10:]}>>"
    assert prompt.removed == 61 - 20 and prompt.context_span is None


def test_a_text_within_longbenchs_limit_stays_whole(tokenizer) -> None:
    prompt = longbench(tokenizer, 61, chat="<<{prompt}>>", context_span=(3, 50))
    assert text_of(tokenizer, prompt.ids) == f"<<{TEXT}>>" and prompt.removed == 0
    assert text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) == TEXT[3:50]
    assert encode_prompt(sample(truncation="longbench"), tokenizer) == encode_prompt(sample(), tokenizer)


@pytest.mark.parametrize("span", [(0, 60), (3, 55), (20, 40), (5, 58), (3, 20), (40, 55)])
def test_the_span_follows_longbenchs_cut(tokenizer, span) -> None:
    prompt = longbench(tokenizer, 20, context_span=span)
    text = text_of(tokenizer, prompt.ids)
    assert text == TEXT[:9] + TEXT[-10:]
    inside = text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) if prompt.context_span else ""
    assert inside == "".join(character for character in TEXT[slice(*span)] if character in text)


def test_a_wrapped_text_that_does_not_fit_is_cut_further(tokenizer) -> None:
    prompt = longbench(tokenizer, 40, room=30, chat="<<{prompt}>>")
    text = text_of(tokenizer, prompt.ids)
    assert len(prompt.ids) <= 30 and text.startswith("<<abc") and text.endswith(TEXT[-3:] + ">>")
    assert len(prompt.ids) == 30 and prompt.removed == 61 - 26
    assert longbench(tokenizer, 40, room=44, chat="<<{prompt}>>").removed == 61 - 40
    with pytest.raises(DataError, match="toy/0: a prompt of 5 tokens is too small even for the chat template"):
        longbench(tokenizer, 40, room=5, chat="<<<<{prompt}>>>>")


def test_a_prompt_given_in_token_ids_is_used_unchanged(tokenizer) -> None:
    given = sample(rules=PromptRules(ids=tuple(range(2048)), ids_context=(2, 7)))
    assert encode_prompt(given, tokenizer, chat="<{prompt}>", limit=10, room=2048) == EncodedPrompt(
        tuple(range(2048)), (2, 7)
    )
    assert encode_prompt(given, tokenizer, limit=2048).ids == encode_prompt(given, tokenizer).ids == tuple(range(2048))
    with pytest.raises(DataError, match=r"2048 tokens, but only 2047(.|\n)*lengths=\[1024\]"):
        encode_prompt(given, tokenizer, limit=9999, room=2047)
    with pytest.raises(DataError, match=r"only 1000(.|\n)*lengths=\[1000\]"):
        encode_prompt(given, tokenizer, limit=1000)


def test_a_prompt_may_be_as_long_as_the_limit(tokenizer) -> None:
    assert encode_prompt(sample(), tokenizer, limit=61).removed == 0
    assert encode_prompt(sample(), tokenizer, limit=60).removed == 1


@pytest.mark.parametrize(("limit", "fits"), [(7, True), (6, False)])
def test_two_tokens_of_the_text_are_the_least_beside_the_wrapper(tokenizer, limit, fits) -> None:
    if fits:
        assert text_of(tokenizer, encode_prompt(sample(), tokenizer, chat="<<{prompt}>>", limit=limit).ids) == "<<a7>>"
        return
    with pytest.raises(DataError, match=f"prompt limit of {limit} tokens is too small.*\n.*model.prompt_limit"):
        encode_prompt(sample(), tokenizer, chat="<<{prompt}>>", limit=limit)


def test_an_odd_room_keeps_one_more_of_the_end(tokenizer) -> None:
    text = text_of(tokenizer, encode_prompt(sample(), tokenizer, chat="<{prompt}>", limit=3 + 5).ids)
    assert text == f"<{TEXT[:2]}{TEXT[-3:]}>"


def test_a_system_turn_comes_first_and_only_with_the_tokenizers_template() -> None:
    tokenizer = byte_tokenizer()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    ruled = sample(prompt="abc", rules=PromptRules(system="Be brief."))
    prompt = encode_prompt(ruled, tokenizer, chat="template")
    assert text_of(tokenizer, prompt.ids) == "<system>Be brief.<user>abc<assistant>"
    assert tokenizer.bos_token_id not in prompt.ids
    assert text_of(tokenizer, encode_prompt(ruled, tokenizer, chat="<{prompt}>").ids) == "<abc>"
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(ModelError, match=r"rejects a system turn: no system turn\n  hint: set dataset\.system=null"):
        wrapper("template", tokenizer, "Be brief.")
    with pytest.raises(ModelError, match=r"rejects the prompt: no system turn$"):
        wrapper("template", tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ModelError, match="changes the text of a user's turn"):
        wrapper("template", tokenizer)


def test_a_wrapper_is_split_at_the_prompt() -> None:
    assert wrapper("a{prompt}b", None) == ("a", "b", True)
    assert wrapper("none", None) == ("", "", True)


def test_a_tokenizer_without_offsets_is_refused() -> None:
    slow: Any = SimpleNamespace(is_fast=False)
    with pytest.raises(ModelError, match="SimpleNamespace does not return character offsets"):
        encode_prompt(sample(), slow)


def test_the_end_text_ends_an_answer_by_its_last_token(tokenizer) -> None:
    assert end_ids(sample(), tokenizer) == []
    assert text_of(tokenizer, end_ids(sample(end_text="ab."), tokenizer)) == "."
    assert len(end_ids(sample(end_text="ab."), tokenizer)) == 1


def test_the_reference_answer_in_token_ids(tokenizer) -> None:
    assert text_of(tokenizer, answer_ids(sample(), tokenizer)) == "1"
    assert tokenizer.bos_token_id not in answer_ids(sample(), tokenizer)
    assert text_of(tokenizer, answer_ids(sample(target=" one"), tokenizer)) == " one"
    assert answer_ids(sample(answer_ids=(7, 8), target=" one"), tokenizer) == [7, 8]
    assert answer_ids(sample(answer_ids=()), tokenizer) == []
    assert answer_ids(sample(answers=()), tokenizer) == []


def test_a_batch_has_the_padding_the_text_and_the_sources_of_its_rows() -> None:
    prompts = [EncodedPrompt((5, 6), (0, 1)), EncodedPrompt((7, 8, 9), None)]
    ids, mask, described = pad(prompts, ["q", "r"], 3, "cpu", str, ["last_chunk", None])
    assert ids.tolist() == [[3, 5, 6], [7, 8, 9]] and mask is not None
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]] and not mask.is_floating_point()
    assert described.context_spans == [(0, 1), None] and described.query_sources == ["last_chunk", None]
    assert described.decode is str and described.input_ids is ids
    bare = pad(prompts[:1], ["q"], 3, "cpu")[2]
    assert bare.decode is None and bare.query_sources is None


def test_the_answer_is_reserved_before_the_models_limit_only() -> None:
    assert prompt_limit(500, 512, 12) == 500
    assert prompt_limit(501, 512, 12) == 500
    assert prompt_limit(300, None, 12) == 300
