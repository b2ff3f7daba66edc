"""Up to how many tokens a method leaves all exact: what it says, and what its cache does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.models.load import hf_config, random_model
from kvbench.models.spec import ModelConfig
from kvbench.util.schema import build
from tests.run_support import ARCHITECTURE

#: QuantSpec's formats with small groups
NIBBLES = {
    "key": {"bits": 8, "group_size": 16, "axis": "channel", "kind": "hierarchical"},
    "value": {"bits": 8, "group_size": "head_dim", "axis": "token", "kind": "hierarchical"},
}

#: method, options, tokens that all stay exact
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("kivi", {"residual": 32}, 31),
    ("kivi", {"residual": 32, "sinks": 3}, 34),
    ("kivi", {"residual": 32, "sinks": 3, "evict": True}, 35),
    ("logquant", {"window": 10, "quantizer": "int2"}, 29),
    ("logquant", {"reserved": 36, "sinks": 2, "quantizer": "int2"}, 37),
    ("partial_logquant", {"window": 10, "quantizer": "int2"}, 10),
    ("partial_logquant", {"window": 10, "sinks": 2, "value_window": "released", "quantizer": "int2"}, 11),
    ("snapkv", {"budget": 40, "window": 4}, 40),
    ("h2o", {"budget": 40}, 40),
    ("h2o", {"budget": 40, "evict": "prefill"}, 40),
    ("streamingllm", {"budget": 40}, 40),
    ("quantspec", {"gamma": 0, "quantizer": NIBBLES}, 31),
]


@pytest.fixture(scope="module")
def model() -> Any:
    made = {"name": "toy", "weights": "random", "max_length": 512, "architecture": ARCHITECTURE}
    return random_model(hf_config(build(ModelConfig, made, "model")), torch.float32, torch.device("cpu"), 0).eval()


def touched(model: Any, method: Any, count: int) -> bool:
    """Return True if a token of a prompt of `count` tokens is packed or dropped."""
    cache = method.new_cache(model)
    with torch.inference_mode():
        model(torch.arange(count)[None] % 50, past_key_values=cache, use_cache=True)
    layer = cache.layers[0]
    exact = [
        sum(segment.length(slice(0, 1)) for segment in store.segments if not segment.packed) for store in layer.stores()
    ]
    return min(exact) < count


@pytest.mark.parametrize(("name", "options", "exact"), CASES, ids=[f"{name} {i}" for i, (name, *_) in enumerate(CASES)])
def test_a_method_does_what_it_says(model: Any, name: str, options: dict[str, Any], exact: int) -> None:
    method = load_method(name, **options)
    reach = method.reach()
    assert reach is not None
    assert reach.tokens == exact
    assert reach.value == (options.get(reach.key.removeprefix("method.")) or method.quantizer.key.group_size)
    assert not touched(model, method, exact)
    late = name == "quantspec"  # a prompt of two groups is left to the first step
    assert touched(model, method, exact + 1 + late)


def test_a_context_in_which_nothing_would_be_packed_is_refused() -> None:
    method = load_method("kivi", residual=128)
    method.check_reach(129)  # 128 tokens are cached, and the keys leave the window
    with pytest.raises(ConfigError, match=r"method\.residual=128: nothing would be packed .* model\.max_length=128"):
        method.check_reach(128)
    for name in ("fp16", "atom", "kvquant"):
        load_method(name).check_reach(2)
    load_method("quantspec", target="fp16", draft="kivi").check_reach(16)


@pytest.mark.parametrize("key", ["residual", "value_residual"])
def test_a_window_that_never_fills(key: str) -> None:
    method = load_method("hf_quantized", **{key: 300})
    method.check_reach(301)
    with pytest.raises(ConfigError, match=f"method.{key}=300: is so large that no generated token would be packed"):
        method.check_reach(300)


def test_shares_reach_as_far_as_what_they_must_hold() -> None:
    assert load_method("h2o", budget=0.2).reach().tokens == 2
    assert load_method("h2o", budget=0.2, recent=7).reach().tokens == 8
    assert load_method("streamingllm", budget=0.25, sinks=4).reach().tokens == 5
    assert load_method("snapkv", budget=0.25, window=8).reach().tokens == 8
    assert load_method("hf_quantized").reach() is None
    assert load_method("hf_quantized", sinks=2, recent=5).reach().tokens == 7
    assert load_method("kvquant", first_tokens=5).reach().tokens == 5
    assert load_method("cocktail", chunk_size=16).reach().tokens == 15


@pytest.mark.parametrize("name", ["kivi", "logquant", "partial_logquant", "atom", "quantspec"])
def test_a_packing_method_cannot_do_without_a_format(name: str) -> None:
    made = type(load_method(name))(takes=("none",))
    with pytest.raises(ConfigError, match="packs keys and values, so it needs a quantizer"):
        made.check()


@pytest.mark.parametrize("takes", [(), ("none",)])
@pytest.mark.parametrize("quantizer", ["none", "int4_token"])
def test_a_yaml_without_takes_is_named(takes: tuple[str, ...], quantizer: str) -> None:
    group = {"_target_": "kvbench.methods.logquant.LogQuant", "takes": list(takes)}
    if takes:
        del group["takes"]  # the default
    with pytest.raises(ConfigError) as caught:
        load_method(group, quantizer)
    assert "add takes: [int4_token, ...] to the YAML of method=logquant" in caught.value.hint
    assert "takes=['int4_token']" in caught.value.hint
    assert load_method({**group, "takes": ["int4_token"]}, "int4_token").quantizer is not None


def test_a_method_that_needs_a_format_proposes_one_that_it_takes() -> None:
    with pytest.raises(ConfigError, match="packs keys and values") as caught:
        load_method("logquant", "none", takes=["none", "int2"])
    assert caught.value.hint == "quantizer=int2"


def test_a_quantizer_is_called_what_it_is() -> None:
    def formats(group: int, **name: str) -> dict[str, Any]:
        return {
            **name,
            "key": {"bits": 2, "group_size": group, "axis": "channel"},
            "value": {"bits": 2, "group_size": group, "axis": "token"},
        }

    with pytest.raises(ConfigError, match=r"quantizer\.name=int2_g64: does not match the formats") as caught:
        load_method("logquant", quantizer=formats(32, name="int2_g64"))
    assert "quantizer.name='int2_g64+key.group_size=32,value.group_size=32'" in str(caught.value)
    with pytest.raises(ConfigError, match="does not match the formats"):
        load_method("kivi", quantizer=formats(32, name="int2+key.group_size=64"))
    assert load_method("kivi", quantizer=formats(32, name="int2")).quantizer.name == "int2"
    kinds = formats(32, name="int2")
    kinds["key"] = {**kinds["key"], "kind": "affine"}  # the default, spelled out
    assert load_method("kivi", quantizer=kinds).quantizer.name == "int2"
    right = "int2+key.group_size=64,value.group_size=64"
    assert load_method("kivi", quantizer=formats(64, name=right)).quantizer.name == right
    assert load_method("kivi", quantizer=formats(64)).quantizer.name == right
    assert load_method("kivi", quantizer=formats(32)).quantizer.name == "int2"
    mine = load_method("kivi", quantizer=formats(64, name="mine"), takes=["mine"])
    assert mine.quantizer.name == "mine"
    with pytest.raises(ConfigError, match="does not accept this quantizer"):
        load_method("kivi", quantizer="hierarchical")


def test_prompts_alone_count_where_only_prompts_are_packed() -> None:
    of_prompt = {"cocktail", "snapkv"}
    for name in ("kivi", "logquant", "partial_logquant", "h2o", "streamingllm", "quantspec", "cocktail", "snapkv"):
        assert load_method(name).reach().of_prompt == (name in of_prompt), name
    for name in ("h2o", "streamingllm"):
        assert load_method(name, evict="prefill").reach().of_prompt
        assert load_method(name, evict="prefill", budget=0.5).reach().of_prompt
    assert load_method("snapkv", budget=0.5).reach().of_prompt and not load_method("h2o", budget=99).reach().of_prompt


def test_the_setting_that_decides_is_named() -> None:
    for name, options, key, value in (
        ("logquant", {}, "method.reserved", 128),
        ("logquant", {"window": 10}, "method.window", 10),
        ("partial_logquant", {}, "method.reserved", 128),
        ("h2o", {"budget": 99}, "method.budget", 99),
        ("h2o", {"recent": 7}, "method.recent", 7),
        ("h2o", {}, "method.recent", 0.5),
        ("streamingllm", {"budget": 0.5}, "method.sinks", 4),
        ("hf_quantized", {"sinks": 2}, "method.sinks", 2),
        ("hf_quantized", {"sinks": 2, "recent": 5}, "method.recent", 5),
        ("kvquant", {"first_tokens": 5}, "method.first_tokens", 5),
        ("cocktail", {}, "method.chunk_size", 32),
    ):
        reach = load_method(name, **options).reach()
        assert (reach.key, reach.value) == (key, value), (name, options)


@pytest.mark.parametrize("key", ["window", "kernel"])
def test_what_snapkv_looks_at_is_shorter_than_a_prompt(key: str) -> None:
    method = load_method("snapkv", **{"window": 5, "kernel": 5, "budget": 0.5, key: 41})
    method.check_reach(43)
    with pytest.raises(ConfigError, match=rf"method\.{key}=41: is larger than any prompt(?s:.*)at most 40"):
        method.check_reach(41)
