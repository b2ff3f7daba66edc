"""One layer without a model: what transformers asks of it, its positions and counts, and the phases of its prompt."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Padding, Prefill, Progress
from kvbench.errors import CacheError
from kvbench.methods import Method, load_method
from tests import zoo

ALL, ONE = slice(None), slice(0, 1)


def placed(method: Method, tokens: int, starts: list[int] | None = None, window: int | None = None) -> KVLayer:
    """A layer after a prompt, one row per entry of `starts`."""
    layer = KVLayer(method, 0, Progress(padding=Padding(starts)), window)
    zoo.feed(layer, *zoo.random_kv(tokens, len(starts or [0])))
    return layer


def kivi() -> Method:
    return load_method("kivi", quantizer="int8", residual=32)


def test_new_tokens_are_handed_to_attention_once_and_never_as_a_tensor():
    layer = zoo.new_layer(load_method("fp16"))
    assert not layer.is_initialized and layer.get_seq_length() == 0
    keys, values = zoo.random_kv(5, 2, channels=32)[0].half(), zoo.random_kv(5, 2, channels=16)[1].half()
    handle, other = layer.update(keys, values, "ignored", cache_position="ignored")
    assert handle is other and handle.layer is layer
    with pytest.raises(CacheError, match=r"read as a tensor \('\.shape'\), so the model does not use kvbench's"):
        _ = handle.shape
    fresh = handle.claim()
    assert fresh[0] is keys and fresh[1] is values
    with pytest.raises(CacheError, match="attention ran twice"):
        handle.claim()
    assert (layer.batch, layer.heads, layer.key_dim, layer.value_dim) == (2, 2, 32, 16)
    assert (layer.dtype, layer.device) == (torch.float16, torch.device("cpu"))
    assert (layer.order, layer.firm) == ([None, None], [0, 0])
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(3) == (8, 0)
    assert layer.get_max_length() == -1 and layer.is_compileable is False
    empty = layer.new_empty()
    assert (empty.numel(), empty.dtype, empty.device) == (0, torch.float16, torch.device("cpu"))


def test_shapes_are_recorded_before_the_first_update_if_they_are_announced():
    layer = zoo.new_layer(load_method("fp16"))
    layer.lazy_initialization(*zoo.random_kv(5, 3))
    assert layer.is_initialized and layer.batch == 3 and layer.seen == 0


def test_stored_tokens_carry_no_gradients():
    for method in (load_method("fp16"), load_method("atom", prefill="quantized")):
        layer = zoo.new_layer(method)
        keys, values = (x.requires_grad_() for x in zoo.random_kv(6))
        if method.quantized_prefill:
            layer.update(keys[:, :, :5], values[:, :, :5])
            layer.place_chunk(keys[:, :, :5], values[:, :, :5])
        else:
            zoo.feed(layer, keys[:, :, :5], values[:, :, :5])
        zoo.feed(layer, keys[:, :, 5:], values[:, :, 5:])
        assert not any(buffer.requires_grad for segment in layer.segments() for _, buffer in segment.buffers())


def test_a_step_settles_before_its_tokens_come_unless_the_cache_is_frozen():
    layer = placed(load_method("atom"), 8)
    keys, values = zoo.random_kv(1)
    assert [store.signature(0) for store in layer.stores()] == [(8, 0), (8, 0)]
    for _ in range(2):
        zoo.feed(layer, keys, values)
    assert [store.signature(0) for store in layer.stores()] == [(9, 1), (9, 1)]
    layer.progress.frozen = True
    zoo.feed(layer, keys, values)
    assert [store.signature(0) for store in layer.stores()] == [(9, 2), (9, 2)]
    layer.progress.frozen = False
    zoo.feed(layer, keys, values)
    assert [store.signature(0) for store in layer.stores()] == [(11, 1), (11, 1)]
    layer.settle()
    layer.settle()
    assert [store.signature(0) for store in layer.stores()] == [(12, 0), (12, 0)]


def test_places_of_a_captured_step_are_those_of_both_tails():
    layer = placed(kivi(), 40)
    assert [store.signature(0) for store in layer.stores()] == [(32, 8), (8, 32)]
    assert layer.advance(3) == [(8, 32)] and layer.seen == 43
    assert [store.signature(0) for store in layer.stores()] == [(32, 11), (8, 35)]


def test_rows_whose_windows_began_to_move_at_different_steps_are_appended_each_at_its_place():
    layer = placed(load_method("fp16"), 8, [0, 0])
    keys, values = zoo.random_kv(8, 2)
    for store in layer.stores():
        store.tail.drop_front(ONE, 3)
        store.tail.drop_back(1, 3)
    new = zoo.random_kv(2, 2, seed=1)
    layer.append(*new)
    for store, x, more in zip(layer.stores(), (keys, values), new, strict=True):
        assert torch.equal(store.tail.view(ONE), torch.cat([x[:1, :, 3:], more[:1]], 2))
        assert torch.equal(store.tail.view(slice(1, 2)), torch.cat([x[1:, :, :5], more[1:]], 2))


def test_an_open_prompt_loses_its_newest_tokens_unless_its_attention_is_observed():
    layer = KVLayer(load_method("fp16"), 0, Progress(Prefill(open=True)))
    keys, values = zoo.random_kv(12, 2)
    zoo.feed(layer, keys[:, :, :8], values[:, :, :8])
    layer.crop(-3)
    assert layer.seen == 5
    layer.crop(4)
    assert layer.seen == 4
    zoo.feed(layer, keys[:, :, 8:], values[:, :, 8:])
    layer.seal()
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        assert torch.equal(store.tail.view(ALL), torch.cat([x[:, :, :4], x[:, :, 8:]], 2))
    observing = KVLayer(load_method("snapkv"), 0, Progress(Prefill(open=True)))
    zoo.feed(observing, keys, values)
    observing.observed = torch.zeros(2, 4, 12, 12)
    with pytest.raises(CacheError, match=r"cannot take back 2 tokens .*snapkv.* attention"):
        observing.crop(-2)
    assert observing.seen == 12


def test_a_layer_tells_transformers_what_it_can_do():
    assert KVLayer.is_croppable is True and KVLayer.is_sliding is False
    layer = placed(load_method("fp16"), 3, [0, 0])
    layer.reorder_cache(torch.tensor([1, 1, 0]))
    assert layer.batch == 3 and layer.order == [None] * 3 and layer.firm == [0] * 3


def test_a_positive_crop_keeps_the_first_tokens_and_an_empty_layer_has_none_to_lose():
    layer = placed(load_method("fp16"), 8)
    for count, left in ((9, 8), (8, 8), (0, 8), (6, 6), (torch.tensor(-2), 4)):
        layer.crop(count)
        assert layer.seen == left == layer.stores()[0].tail.lengths[0]
    zoo.new_layer(load_method("fp16")).crop(-1)


def test_new_tokens_are_packed_at_once_only_where_both_sides_have_segments_of_one_kind():
    engine, fp16 = placed(load_method("engine", format="q8_0"), 5), placed(load_method("fp16"), 5)
    packed = engine.packed_at_once()
    assert packed == tuple(store.segments[-2] for store in engine.stores()) and len(packed) == 2
    assert engine.advance(1) == [(5, 5)] and engine.seen == 6
    assert fp16.packed_at_once() is None
    eager = placed(load_method("fp16"), 5)
    eager.method = type("Eager", (), {"eager": True})()
    assert eager.packed_at_once() is None  # nothing is packed
    values = engine.stores()[1]
    values.segments[-2] = values.tail
    assert engine.packed_at_once() is None
