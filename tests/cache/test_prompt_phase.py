"""A layer during prefill: chunks of a prompt, padding, groups of rows, and what a method is given to place."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Padding, Prefill, Progress
from kvbench.errors import CacheError
from kvbench.methods import load_method
from kvbench.methods.fp16 import FP16
from tests import zoo
from tests.cache.test_layer import placed

ALL, ONE = slice(None), slice(0, 1)


def test_a_prompt_in_one_piece_is_not_copied_and_chunks_are_joined_in_a_buffer_of_its_size():
    keys, values = zoo.random_kv(9)
    whole = zoo.new_layer(load_method("fp16"))
    whole.update(keys, values)
    assert whole.extend_prompt(keys, values) == (keys, values) and whole.prompt is None
    layer = KVLayer(load_method("fp16"), 0, Progress(Prefill(Prompts([0], [9]))))
    for first, last in ((0, 4), (4, 9)):
        part = keys[:, :, first:last], values[:, :, first:last]
        layer.update(*part)
        joined = layer.extend_prompt(*part)
        assert torch.equal(joined[0], keys[:, :, :last]) and torch.equal(joined[1], values[:, :, :last])
        assert layer.prompt is not None and [segment.capacity for segment in layer.prompt] == [9, 9]
        assert layer.segments() == list(layer.prompt)
        layer.end_chunk(*joined)
        assert layer.sealed == (last == 9)
    assert layer.prompt is None and [store.signature(0) for store in layer.stores()] == [(9,), (9,)]
    with pytest.raises(CacheError, match="13 prompt tokens arrived, but the cache was made for a prompt of 9 tokens"):
        layer.progress.prefill.is_last(13)


def test_a_method_gets_each_group_of_rows_without_padding_and_with_its_part_of_the_observed_attention():
    calls = []

    class Observing(FP16):
        observe_prompt = 2

        def place(self, layer, rows, keys, values, scores):
            calls.append((rows, keys.clone(), values.clone(), scores.clone()))
            super().place(layer, rows, keys, values, scores)

    layer = KVLayer(Observing(), 0, Progress(padding=Padding([2, 0, 0])))
    keys, values = zoo.random_kv(7, 3)
    layer.update(keys, values)
    layer.observed = scores = torch.rand(3, 4, 2, 7)
    layer.end_chunk(*layer.extend_prompt(keys, values))
    assert layer.observed is None
    for (rows, *got), (wanted, start) in zip(calls, ((slice(0, 1), 2), (slice(1, 3), 0)), strict=True):
        assert rows == wanted
        for tensor, source in zip(got, (keys, values, scores), strict=True):
            axis = -1 if source is scores else -2
            assert torch.equal(tensor, source[wanted].narrow(axis, start, 7 - start))


def test_tokens_that_no_later_token_can_see_are_not_placed():
    layer = placed(load_method("fp16"), 8, [0, 3, 5], window=5)
    assert [store.signature(row) for store in layer.stores() for row in range(3)] == [(4,), (4,), (3,)] * 2
    keys, values = zoo.random_kv(8, 3)
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        assert torch.equal(store.tail.view(slice(1, 2)), x[1:2, :, 4:])
        assert torch.equal(store.tail.view(slice(2, 3)), x[2:, :, 5:])
    assert layer.firm == [8, 8, 0]  # the first two rows have lost tokens
    assert [layer.positions(row).tolist() for row in range(3)] == [[4, 5, 6, 7], [4, 5, 6, 7], [5, 6, 7]]


def test_tokens_that_have_left_the_window_go_when_the_layer_settles_and_may_stay_until_attention_has_run():
    layer = placed(load_method("fp16"), 8, window=5)
    zoo.feed(layer, *zoo.random_kv(2))
    assert layer.length(ALL) == 6
    layer.settle(forget=False)
    assert layer.length(ALL) == 6 and layer.firm == [8]
    layer.settle()
    assert layer.length(ALL) == 4 and layer.firm == [10]
    assert layer.positions(0).tolist() == [6, 7, 8, 9]


def test_an_open_prompt_does_not_settle():
    layer = placed(load_method("fp16"), 8, window=5)
    layer.append(*zoo.random_kv(2))
    layer.seen, layer.sealed = 10, False
    layer.settle()
    assert layer.length(ALL) == 6


def test_chunks_are_stored_as_they_come_behind_the_padding_of_each_row():
    method = load_method("atom", prefill="quantized")
    layer = KVLayer(method, 0, Progress(Prefill(Prompts([0, 5], [9, 4])), padding=Padding([0, 5])))
    keys, values = zoo.random_kv(9, 2)
    lengths = []
    for first, last in ((0, 3), (3, 6), (6, 9)):
        part = keys[:, :, first:last], values[:, :, first:last]
        layer.update(*part)
        layer.place_chunk(*part)
        lengths.append([store.signature(row) for store in layer.stores() for row in (0, 1)])
        assert layer.sealed == (last == 9)
    assert lengths == [[(n, 0), (m, 0)] * 2 for n, m in ((3, 0), (6, 1), (9, 4))]
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        quantizer = store.packed.quantizer
        for row, start in ((0, 0), (1, 5)):
            stored = store.read(slice(row, row + 1), 0, 9 - start, torch.float32)
            assert torch.equal(stored, quantizer.quantize(x[row : row + 1, :, start:]).dequantize())
    assert layer.firm == [0, 0]  # each token is packed on its own


def test_chunks_that_are_stored_as_they_come_push_older_tokens_out_of_the_window():
    """Only those that the oldest token of the new chunk cannot see."""
    layer = KVLayer(load_method("atom", prefill="quantized"), 0, Progress(Prefill(open=True)), window=10)
    keys, values = zoo.random_kv(120)
    seen = []
    for first, last in ((0, 50), (50, 90), (90, 120)):
        part = keys[:, :, first:last], values[:, :, first:last]
        layer.update(*part)
        layer.place_chunk(*part)
        seen.append((layer.length(ALL), list(layer.firm)))
    # hidden from the oldest token of the second chunk: 50 - 9 = 41, of which 32 go at a time; then 81, of which 64
    assert seen == [(50, [0]), (58, [90]), (56, [120])]


def test_a_whole_batch_of_rows_is_expected_where_groups_of_them_come():
    layer = zoo.new_layer(load_method("fp16"))
    layer.progress.prefill.group = (slice(1, 3), 4)
    layer.lazy_initialization(*zoo.random_kv(5, 2))
    assert layer.batch == 4 and layer.firm == [0] * 4 and layer.order == [None] * 4
