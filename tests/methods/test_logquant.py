"""LogQuant's kept positions for every n, W and split; its codes; attention, bill and twins."""

import json
import random
from pathlib import Path

import pytest
import torch

from kvbench.attention import reference
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.logquant import flushes, indices, plan
from tests import slow
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "logquant_indices.json").read_text())


def marked(tokens, heads=1, channels=64):
    """Keys and values whose first channel is the token's position."""
    keys, values = random_kv(tokens, heads=heads, channels=channels)
    for x in (keys, values):
        x[..., 0] = torch.arange(tokens)
    return keys, values


def exact_positions(store):
    return store.tail.view(ALL)[0, 0, :, 0].long().tolist()


def paper_rule(n, W):
    """The rule as the specification states it, list by list."""
    log, loc = [], list(range(n))
    while len(log) + len(loc) >= 3 * W:
        both = log + loc
        log, loc = both[0 : 2 * W : 2], both[2 * W :]
    return log + loc


def test_indices_equal_the_rule_and_its_closed_form():
    for W in range(1, 65):
        for n in [*range(1, 12), *range(12, 10 * W, max(1, W // 3)), 10 * W]:
            kept = indices(n, W)
            assert kept == paper_rule(n, W)
            assert len(kept) == (n if n < 3 * W else 2 * W + n % W)
            demoted = plan(n, W)[0].tolist()
            assert sorted(demoted + kept) == list(range(n))
            assert len(demoted) == W * flushes(n, W)


def test_indices_equal_the_authors_state():
    for W, states in GOLDEN["logquant_fp_after_n_tokens"].items():
        for n, kept in states.items():
            assert indices(int(n), int(W)) == kept


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 42, 64])
def test_the_cache_keeps_those_positions_for_any_split(W, evict):
    method = load_method("logquant", window=W, evict=evict)
    rng = random.Random(W)
    for prompt in (1, W, 2 * W, 3 * W - 1, 3 * W, 5 * W + 1):
        total = 10 * W
        keys, values = marked(total)
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        n = prompt
        while True:
            layer.settle()
            for store in layer.stores():
                assert exact_positions(store) == indices(n, W)
            slots = layer.positions(0).tolist()
            assert slots[len(slots) - len(indices(n, W)) :] == indices(n, W)
            if not evict:
                assert sorted(slots) == list(range(n))
            if n >= total:
                break
            step = min(rng.choice((1, 1, 1, 3, W, 4 * W)), total - n)
            feed(layer, keys[:, :, n : n + step], values[:, :, n : n + step])
            n += step


def test_every_golden_trace_of_partial_logquant():
    for trace in GOLDEN["partial_logquant_traces"]:
        W, prompt = trace["W"], trace["L"]
        method = load_method("partial_logquant", window=W, value_window="released")
        keys, values = marked(trace["steps"][-1]["n"])
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        for step in trace["steps"]:
            n = step["n"]
            if n > prompt:
                feed(layer, keys[:, :, n - 1 : n], values[:, :, n - 1 : n])
            layer.settle()
            assert exact_positions(layer.stores()[0]) == step["k_fp_state_after"]
            assert exact_positions(layer.stores()[1]) == step["v_fp_state_after"]


@pytest.mark.parametrize("value_window", ["recent", "released"])
@pytest.mark.parametrize("W", [1, 3, 4, 8, 21, 42])
def test_partial_logquants_values_stand_in_the_keys_slots(W, value_window):
    method = load_method("partial_logquant", window=W, value_window=value_window, quantizer="int8")
    rng = random.Random(W)
    total = 9 * W + 2
    keys, values = marked(total)
    for prompt in (1, 2 * W + 1, 4 * W):
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        n = prompt
        while n < total:
            step = min(rng.choice((1, 1, 2, W)), total - n)
            feed(layer, keys[:, :, n : n + step], values[:, :, n : n + step])
            n += step
            layer.settle()
            key_store, value_store = layer.stores()
            assert exact_positions(key_store) == indices(n, W)
            newest = min(n, W) if value_window == "recent" else n % W
            assert exact_positions(value_store) == list(range(n - newest, n))
            # the value in each slot is that of the slot's key, quantized once from its exact value
            order = layer.positions(0)
            packed = value_store.segments[0].length(ALL)
            whole = method.make_quantizer("value").quantize(values)
            expected = whole.codes().to(torch.int16)[:, :, order[:packed]]
            assert torch.equal(value_store.segments[0].codes(ALL, 0, packed), expected)


def slow_logquant(keys, values, W, bits, most, value_group):
    """Return LogQuant's tokens after the given ones, dequantized, in slot order; written from Algorithm 1."""
    log, loc, demoted = [], list(range(keys.shape[2])), []
    while len(log) + len(loc) >= 3 * W:
        both = log + loc
        demoted.append(both[1 : 2 * W : 2])
        log, loc = both[0 : 2 * W : 2], both[2 * W :]
    groups = -(-W // most)
    sizes = [W // groups + (g < W % groups) for g in range(groups)]
    parts_k, parts_v = [], []
    for block in demoted:
        first = 0
        for size in sizes:
            group = block[first : first + size]
            parts_k.append(slow.affine(keys[:, :, group].transpose(-1, -2), bits).transpose(-1, -2))
            first += size
        parts_v.append(slow.affine(values[:, :, block].unflatten(-1, (-1, value_group)), bits).flatten(-2))
    exact = log + loc
    return torch.cat([*parts_k, keys[:, :, exact]], 2), torch.cat([*parts_v, values[:, :, exact]], 2)


@pytest.mark.parametrize("W", [8, 42, 64, 85, 127])
@pytest.mark.parametrize("bits", [2, 4])
def test_attention_equals_a_slow_whole_tensor_statement(W, bits):
    method = load_method("logquant", window=W, quantizer=f"int{bits}_g64")
    for prompt, decoded in ((6 * W + 5, 2 * W), (1, 4 * W)):
        before = prompt + decoded
        keys, values = random_kv(before + 1, channels=64)
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        for n in range(prompt, before + 1):
            feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
        query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(5))
        got = reference.attend_reference(None, layer, query, None, 0.15)
        stored = slow_logquant(keys[:, :, :before], values[:, :, :before], W, bits, 64, 64)
        full = [torch.cat([p, x[:, :, before:]], 2) for p, x in zip(stored, (keys, values), strict=True)]
        torch.testing.assert_close(got, slow.attention(query, *full, 0.15), rtol=1e-4, atol=1e-5)


def used(layer):
    total = {"codes": 0, "scales": 0, "window": 0}
    for store in layer.stores():
        for segment in store.segments:
            for part, size in segment.used(0).items():
                total[part] += size
    return total


@pytest.mark.parametrize("W", [8, 42, 64, 85])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_bill_is_the_formula_to_the_byte(W, bits):
    heads, channels = 2, 64
    formats = {
        "name": "test",
        "key": {"bits": bits, "group_size": 64, "axis": "channel"},
        "value": {"bits": bits, "group_size": 32, "axis": "token"},
    }
    method = load_method("logquant", window=W, quantizer=formats, takes=["test"])
    for n in (1, 3 * W - 1, 3 * W, 7 * W + 3):
        layer = new_layer(method)
        feed(layer, *(x.bfloat16() for x in random_kv(n, heads=heads, channels=channels)))
        exact = len(paper_rule(n, W))
        rest = n - exact
        assert used(layer) == {
            "codes": 2 * heads * rest * channels * bits // 8,
            "scales": 4 * heads * channels * (rest // W) * -(-W // 64) + heads * rest * 4 * channels // 32,
            "window": 2 * heads * exact * channels * 2,
        }
        twin = new_layer(load_method("logquant", window=W, quantizer=formats, takes=["test"], evict=True))
        feed(twin, *(x.bfloat16() for x in random_kv(n, heads=heads, channels=channels)))
        assert used(twin) == {"codes": 0, "scales": 0, "window": 2 * heads * exact * channels * 2}


def test_sinks_stay_exact_beside_the_rule():
    for name in ("logquant", "partial_logquant"):
        method = load_method(name, window=4, sinks=3)
        keys, values = marked(60)
        for prompt in (1, 2, 3, 40):
            layer = new_layer(method)
            feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
            for n in range(prompt, 60):
                feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
            layer.settle()
            store = layer.stores()[0]
            assert store.segments[0].view(ALL)[0, 0, :, 0].tolist() == [0, 1, 2]
            assert exact_positions(store) == [3 + p for p in indices(57, 4)]
            assert sorted(layer.positions(0).tolist()) == list(range(60))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("logquant", {"window": 0}, "method.window=0"),
        ("logquant", {"reserved": 2}, "method.reserved=2: is too small for a window"),
        ("logquant", {"sinks": -2}, "method.sinks"),
        ("logquant", {"key_axis": "both"}, "method.key_axis"),
        ("partial_logquant", {"evict": True}, "method.evict"),
        ("partial_logquant", {"value_window": "old"}, "method.value_window"),
    ],
)
def test_wrong_settings_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_method(name, **overrides)


def test_reserved_is_a_shorthand_for_the_window():
    assert load_method("logquant").W == 42
    assert load_method("logquant", reserved=256).W == 85
    assert load_method("partial_logquant").W == 64
    assert load_method("logquant", window=64, reserved=256).W == 64


@pytest.mark.parametrize("sinks", [0, 5, 13])
def test_a_sliding_window_drops_flushes_that_it_has_passed_whole_and_no_other(sinks):
    method = load_method("logquant", window=8, sinks=sinks)
    demoted = plan(400 - sinks, 8)[0] + sinks
    last = demoted.view(-1, 8).amax(-1)  # newest token of each flush
    for hidden in range(150):
        flushes = method.passed(hidden) // 8
        assert (last[:flushes] < hidden).all()
        assert flushes == 0 or method.passed(hidden) % 8 == 0
    assert method.passed(149) >= 8 * 14


def test_a_sliding_window_that_shows_exact_tokens_only_packs_none():
    """It shows one token less than it is long; exact are fewer than 3 W, and the sinks."""
    method = load_method("logquant", window=10, sinks=3)
    assert [method.whole_window(window) for window in (None, 1, 33, 34)] == [False, True, True, False]
    assert [load_method("logquant", window=10).whole_window(window) for window in (30, 31)] == [True, False]


@pytest.mark.parametrize(("most", "room"), [(3 * 64 + 4, False), (3 * 64 + 5, True)])
def test_room_for_packed_tokens_is_that_of_the_flushes_to_come(most, room):
    """Sinks are never packed, so five of them put the first flush off by five tokens."""
    layer = new_layer(load_method("logquant", window=64, sinks=5))
    layer.progress.max_length = most
    feed(layer, *random_kv(3, channels=64))
    assert all((store.packed.capacity > 0) == room for store in layer.stores())
