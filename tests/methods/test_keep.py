"""Eviction, then packing: what is kept and where it goes, equality with Kivi, bytes by formula, refusals."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from kvbench.cache.segments.packed import PackedSegment
from kvbench.errors import CacheError, ConfigError
from kvbench.methods import KeepMethod, load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.refusals import Reach
from tests import zoo
from tests.zoo import feed, new_layer, random_kv

KEYS, VALUES = random_kv(100, heads=2, channels=32, seed=3)
MORE = random_kv(60, heads=2, channels=32, seed=4)
ONE = slice(0, 1)
FIELDS = {"residual": 32, "newest": 8, "sinks": 4, "by": "key_norm"}


def filled(method, steps: int = 60):
    layer = new_layer(method)
    feed(layer, KEYS, VALUES)
    for at in range(steps):
        feed(layer, *(x[:, :, at : at + 1] for x in MORE))
    layer.settle()
    return layer


def stored(layer, side: int) -> torch.Tensor:
    """Return what attention reads from all slots."""
    store, parts = layer.stores()[side], []
    cuts = store.cuts(ONE, 0, store.length(ONE))
    for first, last in pairwise(cuts):
        parts.append(store.read(ONE, first, last, torch.float32))
    return torch.cat(parts, 2)


def test_each_head_keeps_its_own_tokens_sorted_by_time_and_packs_them():
    method = load_method("keep", quantizer="int8", **FIELDS)
    layer = filled(method, 0)
    positions = layer.positions(0)
    assert positions.shape == (2, 50) and not torch.equal(positions[0], positions[1])
    for head in range(2):
        norms = KEYS[0, head, 4:92].norm(dim=-1)
        scored = (norms.argsort()[:38] + 4).sort().values
        assert positions[head].tolist() == [0, 1, 2, 3, *scored.tolist(), *range(92, 100)]
    # 46 tokens after the sinks: 46 mod 32 keys and 32 values stay exact
    assert [segment.length(ONE) for segment in layer.segments()] == [4, 32, 14, 4, 14, 32]
    for side, x in enumerate((KEYS, VALUES)):
        expected = x[0].gather(1, positions[..., None].expand(2, 50, 32))
        read = stored(layer, side)[0]
        assert torch.equal(read[:, :4], expected[:, :4]) and torch.equal(read[:, -14:], expected[:, -14:])
        assert float((read - expected).abs().max()) < 0.05
    # the groups are those of the kept tokens: quantizing them alone gives the same codes
    segment = layer.stores()[0].segments[1]
    assert isinstance(segment, PackedSegment)
    alone = segment.quantizer.quantize(KEYS.gather(2, positions[None, :, 4:36, None].expand(1, 2, 32, 32)))
    assert torch.equal(segment.codes(ONE, 0, 32).to(torch.uint8), alone.codes())


@pytest.mark.parametrize("quantizer", ["int4", "int2", "int4_token", "none"])
@pytest.mark.parametrize("keep", [0.25, 0.5, 70, 1])
def test_bytes_are_those_of_the_formula(quantizer, keep):
    method = load_method("keep", quantizer=quantizer, **FIELDS, keep=keep)
    shape = {"layers": 1, "query_heads": 2, "heads": 2, "channels": 32, "width": 4}
    layer = new_layer(method)
    feed(layer, KEYS, VALUES)
    for at in range(60):
        layer.settle()
        used: dict[str, int] = {}
        for segment in layer.segments():
            for part, count in segment.used(0).items():
                used[part] = used.get(part, 0) + count
        predicted = vars(kv_bytes(method, 100 + at, prompt=100, **shape))
        assert {part: count for part, count in predicted.items() if count} == {p: c for p, c in used.items() if c}
        feed(layer, *(x[:, :, at : at + 1] for x in MORE))
    slots = {0.25: 25, 0.5: 50, 70: 70, 1: 100}[keep] + 60
    assert layer.length(ONE) == slots and layer.positions(0).shape[-1] == slots


@pytest.mark.parametrize("quantizer", ["int4", "int2_token"])
def test_keeping_everything_is_kivi(quantizer):
    fields = {"residual": 32, "sinks": 4}
    kivi = filled(load_method("kivi", quantizer=quantizer, **fields))
    keep = filled(load_method("keep", quantizer=quantizer, keep=1, newest=8, **fields))
    assert [segment.lengths for segment in kivi.segments()] == [segment.lengths for segment in keep.segments()]
    for side in (0, 1):
        assert torch.equal(stored(kivi, side), stored(keep, side))
    assert keep.order == [None] and not keep.method.drops_tokens and keep.method.observe_prompt == 0


def test_the_attention_of_the_last_queries_is_the_score():
    method = load_method("keep", keep=20, sinks=0, newest=4)
    assert method.observe_prompt == 32
    attention = torch.zeros(1, 4, 32, 100)
    attention[:, :2, :, 30:40], attention[:, 2:, ::2, 60:80] = 1.0, 1.0  # query heads 0, 1 and 2, 3 share a KV head
    index = method.choose(KEYS, VALUES, attention)
    assert index[0, 0].tolist() == [*range(6), *range(30, 40), *range(96, 100)]
    assert index[0, 1].tolist() == [*range(60, 76), *range(96, 100)]


@dataclass(kw_only=True)
class Late(KeepMethod):
    """The newest tokens stay: the window of a text, as a scorer of two lines."""

    def score(self, keys, values, attention):
        return torch.arange(keys.shape[2]).expand(keys.shape[:3]).float()


def test_a_scorer_of_ones_own_needs_nothing_else():
    late = {"_target_": f"{__name__}.Late", "takes": ["int4", "none"], "keep": 0.3, "newest": 0}
    method = load_method(late, quantizer="int4")
    layer = filled(method, 0)
    assert layer.positions(0)[0].tolist() == [*range(70, 100)]
    plain = load_method(late)
    assert plain.quantizer is None and plain.prompt_only and filled(plain, 3).length(ONE) == 33


def test_a_sliding_window_drops_slots_that_no_head_needs():
    """Codes move in whole groups; what is left equals the tokens at the positions that the layer tells."""
    method = load_method("keep", quantizer="int8", **FIELDS, keep=0.6)
    layer = new_layer(method)
    layer.window = 80
    feed(layer, KEYS, VALUES)
    layer.settle()
    keys = torch.cat([KEYS, MORE[0]], 2)
    for at in range(60):
        feed(layer, *(x[:, :, at : at + 1] for x in MORE))
        layer.settle()
        positions = layer.positions(0)
        assert positions.shape[-1] == layer.length(ONE)
        places = positions.expand(2, -1) if positions.ndim > 1 else positions.expand(2, len(positions))
        expected = keys[0].gather(1, places[..., None].expand(2, places.shape[1], 32))
        assert float((stored(layer, 0)[0] - expected).abs().max()) < 0.05
    assert layer.length(ONE) < 80 + 32 and int(layer.positions(0).max()) == 159


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0.0}, r"method\.keep=0\.0: is not a share between 0 and 1"),
        ({"keep": 30}, r"method\.keep=30: is too small for the sinks \(4\), the newest tokens \(32\) and one between"),
        ({"newest": -1}, r"method\.newest=-1: must be at least 0"),
        ({"residual": 100}, r"method\.residual=100: must be a multiple of the key group"),
        ({"evict": True}, "evict"),
        ({"quantizer": "hierarchical"}, "hierarchical"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        load_method("keep", **fields)


def test_captured_steps_know_when_the_next_token_moves():
    """`idle` counts the kept tokens: that many steps change nothing but the tails."""
    layer = filled(load_method("keep", quantizer="int4", **FIELDS, keep=0.3), 0)
    idle = layer.method.idle(layer, 0)
    before = [segment.length(ONE) for segment in layer.segments()]
    for at in range(idle + 1):
        after = [segment.length(ONE) for segment in layer.segments()]
        assert [a for i, a in enumerate(after) if i % 3 != 2] == [b for i, b in enumerate(before) if i % 3 != 2]
        feed(layer, *(x[:, :, at : at + 1] for x in MORE))
        layer.settle()
    after = [segment.length(ONE) for segment in layer.segments()]
    assert after[1] + after[4] > before[1] + before[4]


def test_a_model_answers_from_what_is_kept():
    """Half of the prompt in full precision: SnapKV's and Keep's tokens give the same logits if the scores agree."""
    model, (ids, _) = zoo.model("llama"), zoo.padded_batch([80])
    outs = []
    for method in (
        load_method("keep", quantizer="none", keep=40, newest=32, sinks=0),
        load_method("snapkv", budget=40, window=32, kernel=1),
    ):
        cache = method.new_cache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            outs.append(model(torch.tensor([[5]]), past_key_values=cache).logits)
        assert cache.layers[1].positions(0).shape == (2, 41)
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-5)


def test_exact_prompt_tokens_cannot_be_taken_back_after_eviction():
    """What was dropped depends on the whole prompt, so a shorter one would have kept other tokens."""
    layer = filled(load_method("keep", quantizer="int8", **FIELDS), 0)
    assert min(store.tail.lengths[0] for store in layer.stores()) == 14
    with pytest.raises(CacheError, match="only the newest 0 can be removed"):
        layer.crop(-1)
    feed(layer, *(x[:, :, :1] for x in MORE))
    layer.crop(-1)
    assert layer.seen == 100


@pytest.mark.parametrize(
    ("quantizer", "fields", "reach"),
    [
        ("none", {"keep": 70}, Reach("method.keep", 70, 70, of_prompt=True)),
        ("none", {"keep": 0.5}, Reach("method.newest", 13, 13, of_prompt=True)),  # 4 sinks, 8 newest and one more
        ("int4", {"keep": 0.5}, Reach("method.newest", 13, 13, of_prompt=True)),
        ("int4", {"keep": 70}, Reach("method.residual", 32, 35)),  # Kivi's packs sooner than tokens are dropped
        ("int4", {"keep": 35}, Reach("method.keep", 35, 35, of_prompt=True)),
        ("int4", {"keep": 36}, Reach("method.residual", 32, 35)),
        ("int4", {"keep": 1}, Reach("method.residual", 32, 35)),
    ],
)
def test_the_reach_ends_where_tokens_are_dropped_or_packed(quantizer, fields, reach):
    assert load_method("keep", quantizer=quantizer, **FIELDS, **fields).reach() == reach


def test_times_are_known_in_advance_only_if_nothing_is_dropped():
    layer = filled(load_method("keep", quantizer="int4", **FIELDS), 0)
    assert layer.method.demotions(layer, 100) is None
    everything = filled(load_method("keep", quantizer="int4", **FIELDS, keep=1), 0)
    kivi = load_method("kivi", quantizer="int4", residual=32, sinks=4)
    for mine, its in zip(everything.method.demotions(everything, 100), kivi.demotions(everything, 100), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(
    ("keep", "kept"), [(0.5, 50), (0.25, 25), (70, 70), (0.1, 13), (200, 100), (1, 100), (1.0, 100)]
)
def test_so_many_prompt_tokens_are_kept(keep, kept):
    method = load_method("keep", quantizer="none", **FIELDS, keep=keep)
    assert method.kept(100) == kept and method.least == 13
    assert method.drops_tokens == (keep != 1)
    index = method.choose(KEYS, VALUES, None)
    assert (100 if index is None else index.shape[-1]) == kept


def test_without_a_quantizer_everything_is_exact():
    plain, packed = (load_method("keep", quantizer=name, **FIELDS) for name in ("none", "int4"))
    assert (plain.exact(90), plain.unit(64), plain.prompt_only, plain.packs(0, None)) == (90, 1, True, False)
    assert (packed.unit(64), packed.prompt_only, packed.packs(0, None)) == (32, False, True)
    assert packed.exact(90) == (90 % 32, 32)


def test_without_sinks_and_newest_tokens_the_score_alone_chooses():
    method = load_method("keep", quantizer="none", by="key_norm", newest=0, sinks=0, keep=10)
    index = method.choose(KEYS, VALUES, None)
    assert method.least == 1
    for head in range(2):
        assert index[0, head].tolist() == KEYS[0, head].norm(dim=-1).argsort()[:10].sort().values.tolist()


@pytest.mark.parametrize("quantizer", ["none", "int4"])
def test_a_sliding_window_drops_tokens_of_a_prompt_that_was_kept_whole(quantizer):
    method = load_method("keep", quantizer=quantizer, residual=32, newest=8, sinks=4, keep=1)
    kivi = load_method("kivi", quantizer="int4", residual=32, sinks=4)
    layers = [new_layer(method), new_layer(kivi)]
    for layer in layers:
        layer.window = 60
        feed(layer, KEYS, VALUES)
        for at in range(30):
            feed(layer, *(x[:, :, at : at + 1] for x in MORE))
            layer.settle()
    assert layers[0].order == [None]
    mine, its = (layer.length(ONE) for layer in layers)
    assert mine == (59 if quantizer == "none" else its) and mine < 100
