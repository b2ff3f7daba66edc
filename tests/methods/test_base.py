"""Defaults of a method: traits, refusals, modes of perplexity, positions; and small shared rules."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.policy import CacheState
from kvbench.errors import ConfigError
from kvbench.methods import Method, RecencyMethod, ScoredMethod, load_method
from kvbench.methods.base import QUERY_TOKENS, affine
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import check_budget, highest, reduce, tokens, with_recent
from kvbench.methods.leaving import hidden, outlier_block, whole_groups
from kvbench.methods.speculation import Speculation
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.requirements import Package

#: traits that differ from the default, by method
TRAITS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "kivi": {"needs_quantizer": True, "gives_tail": True, "packs_together": True, "settles": True},
    "atom": {"needs_quantizer": True, "by_token": True, "packs_together": True, "settles": True},
    "logquant": {"needs_quantizer": True, "packs_together": True, "settles": True},
    "partial_logquant": {"needs_quantizer": True, "settles": True},
    "quantspec": {"needs_quantizer": True, "packs_together": True, "settles": True},
    "kvquant": {"by_token": True, "packs_together": True, "settles": True, "keys_before_rope": True, "eager": True},
    "cocktail": {"needs_prompts": True},
    "snapkv": {"prompt_only": True, "observe_prompt": 32, "drops_tokens": True},
    "h2o": {
        "observe_prompt": -1,
        "observe_steps": True,
        "observe_group": "mean",
        "drops_tokens": True,
        "settles": True,
    },
    "streamingllm": {"packs_together": True, "drops_tokens": True, "settles": True},
    "hf_quantized": {"settles": True},
}
DEFAULTS = {
    "version": 1,
    "needs_quantizer": False,
    "needs_prompts": False,
    "prompt_only": False,
    "observe_prompt": 0,
    "observe_steps": False,
    "observe_group": None,
    "by_token": False,
    "gives_tail": False,
    "exact_layers": 0,
    "packs_together": False,
    "drops_tokens": False,
    "keys_before_rope": False,
    "quantized_prefill": False,
    "eager": False,
    "settles": False,
}


@pytest.mark.parametrize("name", TRAITS)
def test_what_caches_and_runs_ask_of_a_method(name: str) -> None:
    method = load_method(name)
    assert {trait: getattr(method, trait) for trait in DEFAULTS} == {**DEFAULTS, **TRAITS[name]}
    assert (method.speculation is None) == (name != "quantspec")


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("kivi", {"evict": True}, {"drops_tokens": True}),
        ("logquant", {"evict": True}, {"drops_tokens": True}),
        (
            "atom",
            {"rope": "pre", "prefill": "quantized"},
            {"keys_before_rope": True, "quantized_prefill": True, "eager": True},
        ),
        ("kvquant", {"prefill": "quantized"}, {"quantized_prefill": True}),
        ("h2o", {"evict": "prefill"}, {"observe_steps": False, "prompt_only": True}),
        ("streamingllm", {"evict": "prefill"}, {"prompt_only": True}),
        ("snapkv", {"window": 8, "budget": 20}, {"observe_prompt": 8, "newest": 8, "least": 9}),
        ("quantspec", {"sensitive_layers": 2}, {"exact_layers": 2, "needs_prompts": False}),
        ("quantspec", {"draft": "cocktail"}, {"needs_prompts": True, "own_cache": True}),
        ("quantspec", {"draft": "cocktail", "gamma": 0}, {"needs_prompts": False, "own_cache": False}),
    ],
)
def test_hyper_parameters_change_traits(name: str, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    method = load_method(name, **options)
    assert {trait: getattr(method, trait) for trait in wanted} == wanted


def test_what_a_method_must_define_is_named() -> None:
    for call, name in (
        (lambda: Method().segments(None, "key"), r"Method must define the method segments\(layer, side\)"),
        (lambda: Method().place(None, None, None, None, None), r"Method must define the method place"),
        (lambda: ScoredMethod().score(None, None, None), r"ScoredMethod must define the method score"),
        (lambda: RecencyMethod().exact(3), r"RecencyMethod must define the method exact\(n\)"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            call()


def test_what_a_method_need_not_define() -> None:
    layer = SimpleNamespace(ordered=lambda row: ("order of", row))
    method = Method()
    assert method.positions(layer, 2) == method.columns(layer, 2) == ("order of", 2)
    assert method.reading_order(layer, slice(0, 1)) is None and method.forgotten(layer, 9) == 0
    assert method.reach() is None and method.packages() == () and method.identity() == {}
    assert method.alone() is method and method.settle(layer, slice(0, 1)) is None and method.ready() is None
    method.check_reach(1)
    state = CacheState()
    assert state.clone() is state and state.select([1]) is None


@pytest.mark.parametrize(
    ("name", "options", "mode", "prompt", "message"),
    [
        ("fp16", {}, "fp16", 0, None),
        ("kivi", {}, "fp16", 100, r"dataset\.mode=fp16: does not use a cache, so method=kivi would have no effect"),
        ("kivi", {}, "simulated", 0, None),
        ("kivi", {"evict": True}, "simulated", 0, "is not available for method=kivi, which drops tokens"),
        ("cocktail", {}, "simulated", 100, "method=cocktail, which depends on the prompt"),
        ("snapkv", {}, "simulated", 100, "method=snapkv, which drops tokens"),
        ("cocktail", {}, "decode", QUERY_TOKENS, r"dataset\.prefill=64: must be larger, because cocktail"),
        ("cocktail", {}, "decode", QUERY_TOKENS + 1, None),
        ("snapkv", {}, "decode", QUERY_TOKENS, r"dataset\.prefill=64"),
        ("snapkv", {}, "decode", QUERY_TOKENS + 1, None),
        ("h2o", {}, "decode", 0, None),
    ],
)
def test_perplexity_needs_a_mode_in_which_the_method_does_something(
    name: str, options: dict[str, Any], mode: str, prompt: int, message: str | None
) -> None:
    method = load_method(name, **options)
    if message is None:
        method.check_windows(mode, prompt)
        return
    with pytest.raises(ConfigError, match=message):
        method.check_windows(mode, prompt)


def test_a_format_becomes_the_quantizer_of_its_kind() -> None:
    plain = affine(FormatSpec(bits=2, group_size=64, axis="token"))
    assert type(plain) is AffineQuantizer and (plain.bits, plain.group_size, plain.axis) == (2, 64, "token")
    assert affine(FormatSpec(bits=2, group_size=64, axis="channel"), 80).group_size == 64  # of tokens: nothing to fit
    assert affine(FormatSpec(bits=4, group_size="head_dim", axis="token"), 80).group_size is None
    nibbles = affine(FormatSpec(bits=8, group_size=32, axis="channel", kind="hierarchical"))
    assert type(nibbles) is HierarchicalQuantizer and (nibbles.group_size, nibbles.axis) == (32, "channel")


def test_packages_are_those_of_the_chosen_options() -> None:
    hint = "run pip install 'kvbench[hf]'"
    for backend, module in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        method = load_method("hf_quantized", backend=backend, axis_key=0, axis_value=0, bits=4)
        assert method.packages() == (Package(module, "method.backend", backend, hint),)
    (package,) = load_method("cocktail", encoder="bm25").packages()
    assert package.module == "bm25s"
    drafting = load_method("quantspec", draft="cocktail", draft_options={"encoder": "bm25"})
    assert drafting.packages() == (package,) and load_method("quantspec").packages() == ()


def test_quantspecs_drafts_and_what_they_read() -> None:
    assert load_method("quantspec").speculation == Speculation(gamma=4, draft="upper", weights="same")
    made = load_method("quantspec", draft="snapkv", draft_options={"kernel": 7}, draft_weights="int4", gamma=2)
    draft = made.draft_method
    assert (draft.budget, draft.kernel, draft.pooling, draft.group) == (0.25, 7, "avg", "sum")
    assert draft.group_after_pooling and made.speculation.weights == "int4"
    streaming = load_method("quantspec", draft="streamingllm").draft_method
    assert (streaming.budget, streaming.sinks) == (0.25, 16)
    assert load_method("quantspec", draft="h2o").draft_method.budget == 0.25
    alone = made.alone()
    assert alone.gamma == 0 and made.gamma == 2 and (alone.draft, alone.target) == ("snapkv", "int8")
    method = load_method("quantspec", sensitive_layers=1)
    assert [method.packs(1, window) for window in (None, 129, 130)] == [True, False, True]
    assert not method.packs(0, None) and not load_method(
        "quantspec", target="fp16", draft="full", draft_weights="int4"
    ).packs(1, None)
    assert [method.exact(n) for n in (0, 255, 256, 257, 400)] == [0, 255, 128, 129, 144]
    assert [method.exact_after_prompt(n) for n in (255, 256, 257)] == [255, 256, 129]


def test_counts_of_sliding_windows() -> None:
    assert [hidden(n, 40) for n in (0, 39, 40, 100)] == [0, 0, 1, 61] and hidden(100, None) == 0
    assert [whole_groups(n, 32) for n in (0, 31, 32, 70)] == [0, 0, 32, 64]
    assert [whole_groups(n, 32, 5) for n in (0, 4, 5, 36, 37)] == [0, 0, 5, 5, 37]
    assert [outlier_block(width) for width in (128, 512, 513, 1024, 3000, 65536)] == [128, 128, 64, 64, 16, 1]


def test_bytes_add_up_by_part() -> None:
    one = KVBytes(1, 20, 300, 4000)
    assert one.total == 4321 and one * 2 == KVBytes(2, 40, 600, 8000) and one + one * 2 == one * 3
    at = Setting(tokens=100, prompt=70, query_heads=8, heads=2, channels=64, window=40)
    assert (at.generated, at.hidden, at.shown, at.param) == (30, 61, 39, 2)
    wide = Setting(100, 70, 8, 2, 64, width=4)
    assert wide.param == 4 and (wide.hidden, wide.shown) == (0, 70)
    assert wide.exact(3) == KVBytes(window=2 * 3 * 64 * 4) and wide.both(3) == KVBytes(window=2 * 2 * 3 * 64 * 4)
    three = FormatSpec(bits=3, group_size=32, axis="token")
    assert at.packed(3, three) == KVBytes(codes=2 * 3 * 64 * 3 // 8, scales=2 * 2 * 3 * 2 * 2)
    channels = FormatSpec(bits=2, group_size=64, axis="channel")
    assert at.packed(84, channels, block=42).scales == 2 * 2 * 2 * 64 * 2  # two blocks of one group each
    assert at.packed(170, channels, block=85).scales == 2 * 2 * 4 * 64 * 2


def test_budgets_choices_and_the_newest() -> None:
    assert [tokens(0.25, n, 3) for n in (4, 99, 100)] == [3, 24, 25] and tokens(0.5, 2, 9) == 2
    assert tokens(7, 100, 3) == 7 and tokens(7, 5, 3) == 5 and tokens(1, 100, 3) == 3
    for budget in (1.0, 0.001, 3):
        check_budget(budget, 3, "it")
    for budget, message in ((0.0, "is not a share"), (1.001, "is not a share"), (2, "is too small for it")):
        with pytest.raises(ConfigError, match=rf"method\.budget={budget}: {message}"):
            check_budget(budget, 3, "it")
    scores = torch.tensor([[2.0, 5.0, 2.0, 1.0, 2.0]])
    assert highest(scores, 3).tolist() == [[0, 1, 2]] and highest(scores, 1).tolist() == [[1]]
    assert with_recent(torch.tensor([[0, 2]]), 9, 2).tolist() == [[0, 2, 7, 8]]
    heads = torch.tensor([[1.0, 5.0], [3.0, 4.0]])
    assert [reduce(heads, how, 0).tolist() for how in ("mean", "max", "sum")] == [[2.0, 4.5], [3.0, 5.0], [4.0, 9.0]]


@dataclass(kw_only=True)
class Halves(ScoredMethod):
    """The base class with its defaults."""

    takes: tuple[str, ...] = ("none",)


def test_a_scored_method_keeps_half_unless_it_says_otherwise() -> None:
    method = Halves()
    assert (method.budget, method.newest, method.least, method.split(9)) == (0.5, 0, 1, (4, 0))
    assert method.reach() is None and method.prompt_only and method.drops_tokens
    method.newest, method.budget = 3, 0.1
    assert method.split(50) == (2, 3) and method.split(2) == (0, 2) and method.least == 4
    reach = method.reach()
    assert (reach.key, reach.value, reach.tokens, reach.of_prompt) == ("method.newest", 3, 3, True)
    method.budget = 3
    with pytest.raises(ConfigError, match=r"too small for the newest tokens \(3\) and one before them"):
        method.check()
