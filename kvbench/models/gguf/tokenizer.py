"""Rules by which the tokenizer of a GGUF file splits text before merges apply.

A GGUF file only names its rule (``tokenizer.ggml.pre``). transformers knows some of the names, and uses GPT-2's rule
for all others without a warning: for SmolLM this joins digits which the model has never seen joined. So the rule comes
from the table below, whose entries are compared with llama.cpp's tokens (tests/models/gguf); other names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers, processors

from kvbench.errors import ModelError

#: pieces of text that are split off, by name of the rule; None is GPT-2's own rule after single digits
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_DIGITS, _GPT2 = "single digits", "GPT-2"
#: rule by value of ``tokenizer.ggml.pre``
RULES = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _QWEN2),
}


def split_as_llamacpp(tokenizer: Any, keys: Mapping[str, Any]) -> None:
    """Make a tokenizer of transformers split text, and add BOS tokens, as the keys of its GGUF file say.

    Raises:
        ModelError: the file's ``tokenizer.ggml.pre`` is not in :data:`RULES`.
    """
    if keys.get("tokenizer.ggml.model") == "gpt2":  # byte-level BPE; others split by what their own kind prescribes
        pre = str(keys.get("tokenizer.ggml.pre", "default"))
        tokenizer.backend_tokenizer.pre_tokenizer = splitter(pre)
        if RULES[pre] == _LLAMA3:  # a whole piece that is a token stays one, whatever the merges say
            tokenizer.backend_tokenizer.model.ignore_merges = True
    begins = keys.get("tokenizer.ggml.add_bos_token")
    if isinstance(begins, bool):
        _begin(tokenizer, begins)


def splitter(pre: str) -> Any:
    """Return the rule of ``tokenizers`` for a value of ``tokenizer.ggml.pre``; raise ModelError if it is unknown."""
    rule = RULES.get(pre)
    if rule is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {pre!r}, a way of splitting text that kvbench does not know; it knows "
            f"{', '.join(sorted(RULES))}.\n  hint: use the model's checkpoint in transformers' format: model=OWNER/NAME"
        )
    if rule == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitter("gpt-2")])
    parts = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _begin(tokenizer: Any, begins: bool) -> None:
    """Make a tokenizer put its BOS token before every text if `begins` is True, and before none otherwise."""
    bos = tokenizer.bos_token
    if not begins or bos is None:
        single, special = "$A", []
    else:
        single, special = f"{bos} $A", [(bos, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
