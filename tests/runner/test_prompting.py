"""Spans, chat wrappers and truncation, with a tokenizer of bytes: a token is a character of these texts."""

from __future__ import annotations

import string

import pytest

from kvbench.errors import DataError, ModelError
from kvbench.models.load import byte_tokenizer
from kvbench.runner.prompting import encode_prompt, longbench_cut, pad, prompt_limit, wrapper
from kvbench.tasks.base import PromptRules, Sample

CONTEXT = "0123456789" * 5


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def sample(context: str = CONTEXT, **changes) -> Sample:
    prompt = f"Read: {context}\nAnswer:"
    base = {
        "id": "toy/0",
        "task": "toy",
        "prompt": prompt,
        "answers": ("1",),
        "max_new_tokens": 4,
        "context_span": (6, 6 + len(context)),
        "query": "Answer:",
    }
    return Sample(**{**base, **changes})


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_context_span_in_tokens(tokenizer):
    prompt = encode_prompt(sample(), tokenizer)
    assert text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) == CONTEXT
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert prompt.removed == 0


def test_special_tokens_before_a_context_that_begins_the_prompt_are_outside_of_it(tokenizer):
    prompt = encode_prompt(sample(prompt=CONTEXT + "\nAnswer:", context_span=(0, len(CONTEXT))), tokenizer)
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert prompt.context_span == (1, 1 + len(CONTEXT))


def test_characters_of_several_bytes(tokenizer):
    context = "naïve – 日本"
    prompt = encode_prompt(sample(context), tokenizer)
    assert text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) == context


@pytest.mark.parametrize("limit", range(20, 66))
def test_the_middle_goes_and_the_span_follows(tokenizer, limit):
    whole = encode_prompt(sample(), tokenizer)
    prompt = encode_prompt(sample(), tokenizer, limit=limit)
    assert len(prompt.ids) == limit
    assert prompt.removed == len(whole.ids) - limit
    assert prompt.ids[:5] == whole.ids[:5]
    assert prompt.ids[-5:] == whole.ids[-5:]
    left = text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) if prompt.context_span else ""
    text = text_of(tokenizer, prompt.ids)
    assert left == text.removeprefix("Read: ").removesuffix("\nAnswer:")


@pytest.mark.parametrize("span", [(0, 30), (3, 24), (24, 36), (26, 32), (30, 60), (33, 41), (2, 8), (50, 58)])
@pytest.mark.parametrize("limit", [31, 40])
def test_the_span_keeps_what_is_left_of_a_context_that_begins_or_ends_in_the_cut(tokenizer, span, limit):
    text = string.ascii_letters + string.digits[:8]  # 60 characters, each of them once
    prompt = encode_prompt(sample(prompt=text, context_span=span), tokenizer, limit=limit)
    kept = text_of(tokenizer, prompt.ids)
    inside = text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) if prompt.context_span else ""
    assert len(prompt.ids) == limit and len(kept) in (limit, limit - 1)
    assert inside == "".join(character for character in text[slice(*span)] if character in kept)


@pytest.mark.parametrize(("limit", "removed"), [(20, 41), (21, 41), (60, 1), (61, 0)])
def test_longbenchs_cut_counts_what_it_removed_and_an_odd_limit_loses_one_more(tokenizer, limit, removed):
    text = string.ascii_letters + string.digits[:8]
    kept, border, count = longbench_cut(text, tokenizer, limit)
    assert count == removed and len(kept) == 60 - removed
    assert kept[:border] == text[:border] and text.endswith(kept[border:])


def test_a_task_may_refuse(tokenizer):
    with pytest.raises(DataError, match="toy/0: the prompt has 65 tokens, but at most 40 are allowed"):
        encode_prompt(sample(truncation="refuse"), tokenizer, limit=40)
    assert encode_prompt(sample(truncation="refuse"), tokenizer, limit=65).removed == 0


def test_a_literal_wrapper_stays_whole(tokenizer):
    prompt = encode_prompt(sample(), tokenizer, chat="[INST]{prompt}[/INST]", limit=50)
    text = text_of(tokenizer, prompt.ids)
    assert text.startswith("[INST]Read: ")
    assert text.endswith("Answer:[/INST]")
    assert len(prompt.ids) == 50
    inside = text_of(tokenizer, prompt.ids[slice(*prompt.context_span)])
    assert set(inside) <= set(CONTEXT)


def test_a_wrapper_longer_than_the_limit_is_refused(tokenizer):
    with pytest.raises(DataError, match="chat template"):
        encode_prompt(sample(), tokenizer, chat="x" * 60 + "{prompt}", limit=50)


def test_a_sample_may_go_without_the_wrapper(tokenizer):
    bare = encode_prompt(sample(rules=PromptRules(chat=False)), tokenizer, chat="[INST]{prompt}[/INST]")
    assert bare == encode_prompt(sample(), tokenizer)


def test_the_tokenizers_own_template():
    tokenizer = byte_tokenizer()
    with pytest.raises(ModelError, match=r"model\.chat=none"):
        wrapper("template", tokenizer)
    tokenizer.chat_template = "<s>{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"
    before, after, special = wrapper("template", tokenizer)
    assert (before, after, special) == ("<s><user>", "<assistant>", False)
    prompt = encode_prompt(sample(), tokenizer, chat="template")
    assert prompt.ids.count(tokenizer.bos_token_id) == 1
    assert text_of(tokenizer, prompt.ids[slice(*prompt.context_span)]) == CONTEXT


def test_a_batch_is_padded_on_the_left(tokenizer):
    prompts = [encode_prompt(sample(CONTEXT[:n]), tokenizer) for n in (10, 50, 30)]
    ids, mask, told = pad(prompts, ["q", "r", "s"], 0, "cpu")
    assert ids.shape == (3, 65)
    assert told.starts == [40, 0, 20]
    assert told.lengths == [25, 65, 45]
    assert mask.sum(-1).tolist() == told.lengths
    assert told.queries == ["q", "r", "s"]
    for row, prompt in enumerate(prompts):
        assert tuple(ids[row, told.starts[row] :].tolist()) == prompt.ids
        assert told.context_spans[row] == prompt.context_span  # counted in the row's own tokens


def test_equal_rows_need_no_mask(tokenizer):
    prompts = [encode_prompt(sample(), tokenizer)] * 2
    assert pad(prompts, ["", ""], 0, "cpu")[1] is None


def test_limit_of_a_prompt():
    assert prompt_limit(None, 512, 12) == 500
    assert prompt_limit(300, 512, 12) == 300
    assert prompt_limit(510, 512, 12) == 500
    assert prompt_limit(None, None, 12) is None
