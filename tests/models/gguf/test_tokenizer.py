"""How text is split before merges apply: every rule of the table against llama.cpp's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from kvbench.errors import ModelError
from kvbench.models.gguf.tokenizer import RULES, split_as_llamacpp, splitter
from tests.data_support import golden
from tests.models.gguf.lines import digest, lines, vocabulary


class Fast:
    """What `settle` sees of a fast tokenizer of transformers."""

    bos_token = None

    def __init__(self) -> None:
        tokens, merges = vocabulary()
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self.backend_tokenizer = Tokenizer(BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=pairs))


def tokens(pre: str, kind: str) -> str:
    fast: Any = Fast()
    split_as_llamacpp(fast, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre})
    ids = [[*fast.backend_tokenizer.encode(line, add_special_tokens=False).ids, -1] for line in lines(kind)]
    return digest([token for line in ids for token in line])


@pytest.mark.parametrize("kind", ["generated", "wikitext2", "python"])
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_every_rule_splits_as_llama_cpp_does(pre: str, kind: str) -> None:
    assert tokens(pre, kind) == golden("gguf_tokens.json")["rules"][pre][kind]


def test_every_name_in_the_table_was_compared_and_means_one_rule() -> None:
    wanted = golden("gguf_tokens.json")["rules"]
    assert wanted.keys() == RULES.keys()
    for one in RULES:
        for other in RULES:
            assert (wanted[one] == wanted[other]) == (RULES[one] == RULES[other]), (one, other)


@pytest.mark.parametrize("pre", ["default", "smollm2", "deepseek-llm", ""])
def test_other_names_are_refused(pre: str) -> None:
    with pytest.raises(
        ModelError, match=rf"tokenizer\.ggml\.pre is '{pre}', .* it knows codeshell, .*\n  hint: use the"
    ):
        splitter(pre)


def test_a_vocabulary_that_is_no_byte_level_bpe_keeps_its_own_rule() -> None:
    fast: Any = Fast()
    split_as_llamacpp(fast, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})
    assert fast.backend_tokenizer.pre_tokenizer is None
