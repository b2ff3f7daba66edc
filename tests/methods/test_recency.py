"""Methods given by a number of exact tokens: how long a text stays exact, and rules that cannot be stored."""

from dataclasses import dataclass

import pytest
import torch

from kvbench.decoding.passes import forward, prefill
from kvbench.errors import ConfigError
from kvbench.methods import RecencyMethod, load_method
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec
from tests import zoo

TOKEN = FormatSpec(bits=4, group_size=32, axis="token")
CHANNEL = FormatSpec(bits=4, group_size=32, axis="channel")


@dataclass(kw_only=True)
class Rule(RecencyMethod):
    """A window of `residual` tokens, or what `rule` returns."""

    residual: int = 40
    takes: tuple[str, ...] = ("any",)
    rule: object = None

    def exact(self, n):
        return min(n, self.residual) if self.rule is None else self.rule(n)


def made(key=TOKEN, **fields) -> Rule:
    return Rule(quantizer=QuantizerSpec(name="any", key=key, value=TOKEN), **fields)


@pytest.mark.parametrize(("residual", "sinks"), [(0, 0), (1, 0), (40, 0), (40, 3), (5000, 0)])
def test_the_reach_is_the_longest_text_of_which_nothing_is_packed(residual, sinks):
    method = made(residual=residual)
    method.sinks = sinks
    reach = method.reach()
    assert (reach.tokens if reach else 0) == residual + sinks
    if residual == 5000:
        message = r"method=Rule: nothing would be packed .* 5000 tokens(?s:.*)reduce the window"
        with pytest.raises(ConfigError, match=message):
            method.check_reach(5001)
        method.check_reach(5002)


@pytest.mark.parametrize("name", ["kivi", "quantspec"])
def test_the_papers_reach_is_that_of_their_rule(name):
    method = load_method(name)
    assert RecencyMethod.reach(method).tokens == method.reach().tokens


def test_keys_and_values_may_differ():
    assert made(rule=lambda n: (n % 32, min(n, 32)), key=CHANNEL).windows(100) == (4, 32)
    assert made(rule=lambda n: n // 2).windows(7) == (3, 3)


@pytest.mark.parametrize(
    ("key", "rule", "message"),
    [
        (TOKEN, lambda n: min(n, n % 7 * 3), r"exact\(\d+\) leaves \d+ keys packed, but exact\(\d+\) left \d+"),
        (TOKEN, lambda n: (0, min(n, 100 - n) if n < 100 else n), r"values packed, but exact\(\d+\) left"),
        (CHANNEL, lambda n: min(n, 64), r"quantizer.key.group_size=32: does not divide the 1 keys .*exact\(65\)"),
    ],
)
def test_a_rule_that_cannot_be_stored_is_refused(key, rule, message):
    with pytest.raises(ConfigError, match=message):
        made(key=key, rule=rule).check()


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda n: n / 2, r"exact\(0\) returned 0.0,"),
        (lambda n: n - 8, r"exact\(0\) returned -8,"),
        (lambda n: n + n // 50, r"exact\(50\) returned 51,"),
        (lambda n: (n // 2, n / 2), r"exact\(0\) returned \(0, 0.0\),"),
        (lambda n: (n, n, n), r"exact\(0\) returned \(0, 0, 0\),"),
        (lambda n: [n, n], r"exact\(0\) returned \[0, 0\],"),
        (lambda n: None, r"exact\(0\) returned None,"),
    ],
)
def test_a_rule_returns_whole_numbers_up_to_n(rule, message, evict):
    method = made(rule=rule)
    method.evict = evict
    with pytest.raises(ConfigError, match=f"method=Rule: {message}(?s:.*)from 0 to n"):
        method.check()


def test_a_rule_must_be_given():
    method = RecencyMethod(takes=("any",), quantizer=made().quantizer)
    with pytest.raises(NotImplementedError, match=r"RecencyMethod must define the method exact\(n\)"):
        method.check()


def test_no_flag_says_that_packs_may_be_deferred():
    class Own(Rule):
        def settle(self, layer, rows):
            super().settle(layer, rows)

    assert made().packs_together
    assert not Own(takes=("any",), quantizer=made().quantizer).packs_together


def test_hidden_tokens_leave_in_groups_of_both_sides_or_32_at_a_time():
    assert made(key=CHANNEL).unit(64) == made().unit(64) == 32
    wide = FormatSpec(bits=4, group_size=64, axis="channel")
    odd = FormatSpec(bits=4, group_size=48, axis="channel")
    assert made(key=wide).unit(64) == 64
    assert Rule(quantizer=QuantizerSpec(name="any", key=CHANNEL, value=odd)).unit(64) == 96
    evicting = made(key=CHANNEL)
    evicting.evict = True
    assert evicting.unit(64) == 1


@pytest.mark.parametrize(
    "setting",
    [
        ("quantspec", {"gamma": 0}, True),
        ("kivi", {"residual": 64, "quantizer": "int4"}, False),
        ("atom", {}, False),
        ("logquant", {"window": 16}, False),
        ("streamingllm", {"budget": 64}, False),
        ("snapkv", {"budget": 64, "window": 8}, True),
        ("fp16", {}, True),
    ],
    ids=lambda setting: setting[0],
)
@torch.inference_mode()
def test_a_layer_is_idle_for_as_many_tokens_as_its_method_says(setting):
    """Tokens up to that number change nothing else; with methods that pack seldom it is more than 0."""
    name, options, waits = setting
    model, method = zoo.model("llama"), load_method(name, **options)
    ids, _ = zoo.padded_batch([300], seed=1)
    cache = method.new_cache(model, max_length=600)
    prefill(model, cache, ids, None)
    cache.settle()
    layer = cache.layers[1]
    idle = min(method.idle(layer, 0), 200)
    assert (idle > 0) == waits
    cache.progress.frozen = True
    for more in range(idle + 1):
        if more:
            forward(model, cache, ids[:, :1], None, torch.tensor([[300 + more]]))
        before = [store.signature(0) for store in layer.stores()]
        cache.settle()
        assert [store.signature(0) for store in layer.stores()] == before
    if name == "quantspec":
        forward(model, cache, ids[:, :1], None, torch.tensor([[301 + idle]]))
        before = layer.stores()[0].signature(0)
        cache.settle()
        assert layer.stores()[0].signature(0) != before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kivi", {"quantizer": "int4", "residual": 32, "sinks": 3}),
        ("kivi", {"quantizer": "int4", "residual": 2048}),
        ("atom", {}),
        ("fp16", {}),
    ],
    ids=["kivi", "kivi, a long window", "atom", "fp16"],
)
@pytest.mark.parametrize("prompt", [1, 3, 40, 97])
def test_that_many_steps_pack_nothing(name, options, prompt):
    """`idle` is exact up to its limit: the token after that changes what is packed."""
    method = load_method(name, **options)
    layer = zoo.new_layer(method)
    zoo.feed(layer, *zoo.random_kv(prompt))
    idle = method.idle(layer, 0)

    def packed():
        return [segment.length(slice(0, 1)) for segment in layer.segments() if segment.packed]

    before = packed()
    for step in range(min(idle, 40)):
        zoo.feed(layer, *zoo.random_kv(1, seed=step))
        layer.settle()
        assert packed() == before, step
    if name == "fp16" or options.get("residual") == 2048:
        assert idle >= 1024
    elif prompt >= options.get("sinks", 0):
        assert idle < 40
        zoo.feed(layer, *zoo.random_kv(1, seed=99))
        layer.settle()
        assert packed() != before
