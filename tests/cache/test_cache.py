"""A whole cache: what its layers do together, and what it hands to the cache of a draft model."""

from __future__ import annotations

import math
import types
import warnings

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.cache.bill import Bill, Parts
from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods import load_method
from tests import zoo

ALL = slice(None)
#: bytes of one token's keys, or values, in one layer of :func:`filled`: 2 heads of 32 channels in fp32
TOKEN = 2 * 32 * 4


def feed(cache: KVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Feed the same new tokens to every layer."""
    for layer in cache.layers:
        zoo.feed(layer, keys, values)


def filled(name: str = "fp16", tokens: int = 9, starts: list[int] | None = None, **fields: object) -> KVCache:
    """A cache of two layers after a prompt, one row per entry of `starts`."""
    cache = KVCache(load_method(name, **fields), 2)
    cache.progress.padding.starts = starts
    feed(cache, *zoo.random_kv(tokens, len(starts or [0])))
    return cache


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_a_bill_adds_up_its_parts():
    parts = Parts(codes=1, scales=20, window=300, index=4000)
    assert parts.total == 4321
    parts.add("scales", 5)
    assert parts.as_dict() == {"total": 4326, "codes": 1, "scales": 25, "window": 300, "index": 4000, "state": 0}
    bill = Bill(parts, Parts(codes=7), 8652)
    assert bill.ratio == 2.0 and Bill(parts, Parts(), 8652, width=4).ratio == 4.0
    assert math.isnan(Bill(Parts(), Parts(), 0).ratio)
    assert bill.as_dict() == {"used": parts.as_dict(), "reserved": Parts(codes=7).as_dict(), "fp16_equivalent": 8652}


def test_a_bill_counts_each_row_and_the_buffers_of_the_whole_batch():
    cache = filled(starts=[0, 4])
    whole, rows = cache.bill(), [cache.bill(row) for row in (0, 1)]
    assert [bill.used.as_dict()["window"] for bill in rows] == [2 * 2 * TOKEN * 9, 2 * 2 * TOKEN * 5]
    assert whole.used.window == 2 * 2 * TOKEN * 14
    assert [bill.reserved.window for bill in (whole, *rows)] == [2 * 2 * 2 * TOKEN * 9] * 3
    assert [bill.fp16_equivalent for bill in (whole, *rows)] == [2 * TOKEN * 14, 2 * TOKEN * 9, 2 * TOKEN * 5]
    assert whole.width == 4
    empty = KVCache(load_method("fp16"), 2).bill()
    assert (empty.used.total, empty.reserved.total, empty.fp16_equivalent, empty.width) == (0, 0, 0, 2)


def test_keys_and_values_of_different_sizes_count_each_by_its_own():
    cache = KVCache(load_method("fp16"), 1)
    feed(cache, zoo.random_kv(6, channels=32)[0].half(), zoo.random_kv(6, channels=16)[1].half())
    bill = cache.bill()
    assert bill.used.window == bill.fp16_equivalent == 6 * 2 * (32 + 16) * 2 and bill.width == 2
    sliding = KVCache(load_method("fp16"), 2, windows=[5, None])
    feed(sliding, *zoo.random_kv(8))
    assert sliding.bill().fp16_equivalent == TOKEN * (4 + 8)  # what stock transformers keeps
    # transformers' masks go over all tokens seen, in layers with a window too: which of them are held is the layer's
    assert sliding.is_sliding == [False, False] and sliding.get_mask_sizes(1, 0) == (9, 0)


# -- rollback -------------------------------------------------------------------------------------------------------


def test_rows_that_lose_more_tokens_than_others_move_to_the_right():
    cache = filled(starts=[0, 2, 1])
    keys, values = zoo.random_kv(9, 3)
    ids = torch.stack([torch.arange(9) - start for start in (0, 2, 1)])
    cache.progress.positions.see(ids, 0, [0, 2, 1])
    cache.take_back([3, 1, 2])
    assert cache.get_seq_length() == 8 and cache.progress.padding.starts == [2, 2, 2]
    # the tokens keep their rotary positions in their new columns
    columns = torch.arange(2, 8)
    assert [cache.progress.positions.at(row, columns).tolist() for row in range(3)] == [list(range(6))] * 3
    cache.take_back([2, 2, 2])
    assert cache.get_seq_length() == 6 and cache.progress.padding.starts == [2, 2, 2]
    more = zoo.random_kv(1, 3, seed=1)
    feed(cache, *more)
    for layer in cache.layers:
        assert [layer.positions(row).tolist() for row in range(3)] == [[2, 3, 4, 5, 6]] * 3
        for store, x, new in zip(layer.stores(), (keys, values), more, strict=True):
            for row, start in enumerate((0, 2, 1)):
                wanted = torch.cat([x[row, :, start : start + 4], new[row]], 1)
                assert torch.equal(store.tail.view(slice(row, row + 1))[0], wanted)


def test_padding_is_recorded_only_if_rows_lose_different_numbers_of_tokens():
    cache = filled()
    cache.take_back([4])
    assert cache.progress.padding.starts is None
    pair = KVCache(load_method("fp16"), 1)
    feed(pair, *zoo.random_kv(9, 2))
    pair.take_back([1, 4])
    assert pair.progress.padding.starts == [0, 3] and pair.progress.positions.runs == []


def test_crop_removes_the_newest_tokens_or_keeps_the_first():
    cache = filled()
    for crop, left in ((0, 9), (-2, 7), (12, 7), (torch.tensor(5), 5), (torch.tensor(-1), 4)):
        cache.crop(crop)
        assert [layer.seen for layer in cache.layers] == [left, left]
        assert [layer.length(ALL) for layer in cache.layers] == [left, left]
    KVCache(load_method("fp16"), 2).crop(-3)  # nothing has arrived yet


# -- batches --------------------------------------------------------------------------------------------------------


def test_rows_are_chosen_in_every_layer_and_in_the_shared_state():
    cache = filled(starts=[0, 2, 1])
    cache.progress.positions.see(torch.arange(9)[None] + torch.tensor([[0], [10], [20]]), 0, [0, 2, 1])
    before = [cache.layers[1].stores()[0].tail.view(slice(row, row + 1)).clone() for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 0, 2, 1]))
    assert cache.progress.padding.starts == [1, 0, 1, 2]
    assert [cache.progress.positions.at(row, torch.tensor([5])).item() for row in range(4)] == [25, 5, 25, 15]
    for layer in cache.layers:
        assert layer.batch == len(layer.order) == len(layer.firm) == 4
    for row, source in enumerate((2, 0, 2, 1)):
        assert torch.equal(cache.layers[1].stores()[0].tail.view(slice(row, row + 1)), before[source])


def test_copies_of_a_row_are_adjacent():
    cache = filled(starts=[0, 3])
    cache.batch_repeat_interleave(2)
    assert cache.progress.padding.starts == [0, 0, 3, 3] and cache.layers[0].batch == 4
    cache.layers[1].batch_repeat_interleave(3)
    assert cache.layers[1].stores()[1].signature(5) == (9,) and cache.layers[1].stores()[1].signature(6) == (6,)
    empty = KVCache(load_method("fp16"), 2)
    empty.batch_repeat_interleave(2)
    empty.reorder_cache(torch.tensor([0, 0]))
    assert not empty.layers[0].is_initialized


def test_a_reset_forgets_all_tokens_of_all_layers():
    cache = filled(starts=[0, 3])
    cache.progress.prefill.open = True
    cache.progress.positions.see(torch.arange(9)[None], 0, [0, 3])
    cache.reset()
    progress = cache.progress
    assert cache.get_seq_length() == 0 and not any(layer.is_initialized or layer.sealed for layer in cache.layers)
    assert progress.padding.starts is None and progress.positions.runs == [] and not progress.prefill.open
    assert all(layer.keys_store is None and layer.values_store is None and layer.firm == [] for layer in cache.layers)


def test_a_copy_shares_nothing_that_changes():
    cache = filled("kivi", 40, [0, 1], quantizer="int8", residual=32)
    cache.layers[0].paths.add("sdpa")
    cache.layers[0].pairs.add((0, 1))
    twin = cache.clone()
    for layer, copied in zip(cache.layers, twin.layers, strict=True):
        assert copied.progress is twin.progress is not cache.progress
        # deferred packs go to the queue of the copy
        assert {id(store.packed.packs) for store in copied.stores()} == {id(twin.progress.packs)}
        assert {id(store.packed.packs) for store in layer.stores()} == {id(cache.progress.packs)}
    before = [layer.firm.copy() for layer in cache.layers]
    twin.layers[0].paths.add("triton")
    twin.layers[0].pairs.add((2, 2))
    twin.layers[0].firm[0], twin.layers[0].order[0] = 1, torch.arange(40)
    feed(twin, *zoo.random_kv(2, 2, seed=1))
    twin.progress.padding.starts[0] = 5
    assert cache.layers[0].paths == {"sdpa"} and cache.layers[0].pairs == {(0, 1)}
    assert [layer.firm for layer in cache.layers] == before and cache.layers[0].order == [None, None]
    assert cache.progress.padding.starts == [0, 1] and cache.get_seq_length() == 40
    assert [store.signature(0) for store in cache.layers[0].stores()] == [(32, 8), (8, 32)]


# -- prefill --------------------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_is_placed_when_its_end_is_announced():
    keys, values = zoo.random_kv(40)
    cache = KVCache(load_method("kivi", quantizer="int8", residual=32), 2)
    cache.open_prefill()
    for first, last in ((0, 25), (25, 40)):
        feed(cache, keys[:, :, first:last], values[:, :, first:last])
        assert not cache.layers[0].sealed and cache.layers[0].prompt is not None
    with pytest.raises(CacheError, match=r"layer 0 has no stores yet, .*: call cache\.finalize\(\) first"):
        cache.layers[0].stores()
    cache.finalize()
    assert not cache.progress.prefill.open
    for layer in cache.layers:
        assert layer.sealed and layer.prompt is None
        assert [store.signature(0) for store in layer.stores()] == [(32, 8), (8, 32)]
    cache.finalize()  # once more changes nothing
    assert [store.signature(0) for store in cache.layers[1].stores()] == [(32, 8), (8, 32)]
    empty = KVCache(load_method("fp16"), 1)
    empty.finalize()
    assert not empty.layers[0].sealed  # nothing has arrived


def test_rows_of_a_batch_may_come_in_groups():
    keys, values = zoo.random_kv(9, 3)
    prompts = Prompts([0, 2, 1], [9, 7, 8])
    cache = KVCache(load_method("fp16"), 2, prompts)
    for rows in (slice(0, 2), slice(2, 3)):
        with cache.only(rows, 3):
            assert cache.progress.prefill.group == (rows, 3) and cache.layers[0].seen == 0
            cache.progress.padding.starts = [0, 2, 1]
            feed(cache, keys[rows], values[rows])
            assert cache.layers[1].sealed == (rows.stop == 3)
        assert cache.progress.prefill.group is None
    assert [layer.batch for layer in cache.layers] == [3, 3]
    for row, start in enumerate((0, 2, 1)):
        assert torch.equal(cache.layers[0].stores()[1].tail.view(slice(row, row + 1))[0], values[row, :, start:])
    with pytest.raises(RuntimeError), cache.only(slice(0, 1), 3):
        assert not cache.layers[1].sealed  # rows may be prefilled once more
        raise RuntimeError
    assert cache.progress.prefill.group is None


def test_rows_come_in_groups_only_where_the_prompt_stays_exact_and_keys_are_stored_after_rope():
    assert KVCache(load_method("atom"), 2).takes_groups()
    assert not KVCache(load_method("atom", prefill="quantized"), 2).takes_groups()
    before_rope = KVCache(load_method("atom"), 2)
    before_rope.layers[1].rope = torch.add
    assert not before_rope.takes_groups()
    leader = KVCache(load_method("atom"), 2)
    leader.lead(before_rope)
    assert not leader.takes_groups()


# -- settling and what served the cache -------------------------------------------------------------------------------


def test_settling_looks_for_what_kernels_have_noted():
    cache = filled("kivi", 40, quantizer="int8", residual=32)
    watch = cache.progress.watches.of(torch.device("cpu"))
    watch.tag(lambda place: f"noted at {place}")
    watch.record.copy_(torch.tensor([1, 0, 2, 3, 4, 5], dtype=torch.int32))
    cache.settle_layers()  # does not wait
    with pytest.raises(NonFiniteError, match=r"noted at Place\(row=2, head=3, token=4, channel=5\)"):
        cache.settle()
    cache.settle()  # reported once


def test_only_the_first_layer_of_a_step_looks_for_what_kernels_have_noted():
    cache = filled()
    watch = cache.progress.watches.of(torch.device("cpu"))
    watch.tag(lambda place: "noted")
    watch.record[0] = 1
    keys, values = zoo.random_kv(1)
    cache.layers[1].update(keys, values)
    cache.progress.frozen = True
    cache.layers[0].update(keys, values)
    cache.progress.frozen = False
    with pytest.raises(NonFiniteError, match="noted"):
        cache.layers[0].update(keys, values)


def test_paths_are_named_once_each_in_order():
    cache = filled()
    assert cache.path == "none" and not cache.reads_packed
    cache.layers[0].paths.update(("triton", "sdpa"))
    cache.layers[1].paths.update(("sdpa", "packed"))
    assert cache.path == "sdpa+triton" and cache.reads_packed


def test_only_transformers_own_loop_is_warned_and_once():
    source = "def read(cache):\n    return cache.is_compileable"
    loop = types.ModuleType("transformers.generation.utils")
    exec(source, loop.__dict__)
    drafting = KVCache(load_method("quantspec", gamma=3), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drafting.is_compileable is False
        assert loop.read(KVCache(load_method("fp16"), 1)) is False
    with pytest.warns(UserWarning, match=r"does not speculate: .* drafts 3 tokens per round.*custom_generate"):
        assert loop.read(drafting) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop.read(drafting) is False


def test_the_dtype_of_storage_is_set_for_both_caches_before_any_token_comes():
    llama, ids = zoo.model("llama"), torch.arange(3, 9)[None]
    cache = load_method("quantspec", draft="kivi", draft_options={"quantizer": "int4"}).new_cache(llama)
    assert cache.storage is None
    cache.storage = torch.bfloat16
    assert cache.storage == cache.follower.storage == torch.bfloat16
    with torch.inference_mode():
        llama(ids, past_key_values=cache)
    assert all(layer.dtype == torch.bfloat16 for layer in (*cache.kv_layers, *cache.follower.kv_layers))
    with pytest.raises(CacheError, match="holds tokens already"):
        cache.storage = torch.float16
    assert cache.storage == torch.bfloat16
    cache.method.detach(llama)
