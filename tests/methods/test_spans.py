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
    assert ("dataset.prefill" in str(refusal("decode", QUERY_TOKENS))) is (name in PROMPT_ONLY)
    simulated = str(refusal("simulated", 1024))
    assert ("which drops tokens" in simulated) is (name in DROPS)
    assert ("which depends on the prompt" in simulated) is (name in KNOWS_PROMPT - DROPS)
    assert (simulated == "None") is (name not in DROPS | KNOWS_PROMPT)
