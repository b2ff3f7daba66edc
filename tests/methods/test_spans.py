"""How perplexity may be measured with each method: what would have no effect, or cannot be done, is refused."""

from __future__ import annotations

import pytest

from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.base import QUERY_TOKENS
from kvbench.util.confdir import group_options

#: methods that quantize or drop only tokens of a prompt, those that must know it, and those that drop tokens
PROMPT_ONLY = {"cocktail", "snapkv"}
KNOWS_PROMPT = {"cocktail"}
DROPS = {"h2o", "keep", "snapkv", "streamingllm"}


@pytest.mark.parametrize("name", group_options("method"))
def test_each_way_is_open_or_refused_with_its_reason(name: str) -> None:
    method = load_method(name)

    def refusal(mode: str, prompt: int) -> str | None:
        try:
            method.check_windows(mode, prompt)
        except ConfigError as error:
            return str(error)
        return None

    assert ("has no effect" in str(refusal("fp16", 1024)).replace("would have no", "has no")) is (name != "fp16")
    assert refusal("decode", QUERY_TOKENS + 1) is None
    assert ("dataset.prefill" in str(refusal("decode", QUERY_TOKENS))) is (method.needs_prompts or method.prompt_only)
    simulated = str(refusal("simulated", 1024))
    assert ("which drops tokens" in simulated) is method.drops_tokens
    assert ("which depends on the prompt" in simulated) is (method.needs_prompts and not method.drops_tokens)
    assert (simulated == "None") is not (method.drops_tokens or method.needs_prompts)


def test_methods_know_what_they_do() -> None:
    methods = {name: load_method(name) for name in group_options("method")}
    exact = {"fp16", "atom", "kivi", "kvquant", "logquant", "quantspec"}
    for named, claims in (
        (PROMPT_ONLY, {name for name, method in methods.items() if method.needs_prompts or method.prompt_only}),
        (KNOWS_PROMPT, {name for name, method in methods.items() if method.needs_prompts}),
        (DROPS, {name for name, method in methods.items() if method.drops_tokens}),
    ):
        assert named <= claims and not exact & claims
