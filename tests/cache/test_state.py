"""Positions and counts of a layer's tokens, and the runs of rows that are processed together."""

from __future__ import annotations

import torch

from kvbench.cache import KVCache, sliding
from kvbench.methods import load_method
from tests import zoo
from tests.cache.test_layer import kivi, placed

ALL, ONE = slice(None), slice(0, 1)


def test_counts_of_a_row_leave_padding_out():
    layer = placed(load_method("fp16"), 8, [0, 3])
    assert [layer.start(row) for row in (0, 1)] == [0, 3]
    assert [layer.first(row) for row in (0, 1)] == [0, 3]
    assert [layer.real_tokens(row) for row in (0, 1)] == [8, 5]
    assert [layer.hidden(row) for row in (0, 1)] == [0, 0] and layer.visible_tokens(1) == 5
    layer.window = 5
    assert [layer.hidden(row) for row in (0, 1)] == [4, 1]
    assert [layer.visible_tokens(row) for row in (0, 1)] == [4, 4]
    layer.window = 7
    assert [layer.hidden(row) for row in (0, 1)] == [2, 0] and [layer.visible_tokens(row) for row in (0, 1)] == [6, 5]
    assert zoo.new_layer(load_method("fp16")).start(3) == 0


def test_buffers_are_made_for_the_expected_length():
    layer = zoo.new_layer(load_method("fp16"))
    layer.seen = 10
    assert (layer.expected_length(), layer.coming()) == (10, 0)
    layer.progress.max_length = 300
    assert (layer.expected_length(), layer.coming()) == (300, 290)
    layer.seen = 400
    assert (layer.expected_length(), layer.coming()) == (400, 0)
    layer.window = 50
    assert layer.expected_length() == 49 + 96
    layer.window = 4096
    assert layer.expected_length() == 400
    assert [sliding.room(window) for window in (50, 768, 776, 4096)] == [145, 863, 872, 4607]


def test_rows_are_processed_together_where_padding_lengths_and_offsets_agree():
    layer = placed(load_method("fp16"), 8, [0, 0, 2, 2])
    assert layer.row_groups() == [slice(0, 2), slice(2, 4)]
    layer.progress.padding.starts = None
    assert layer.row_groups() == [slice(0, 2), slice(2, 4)]  # other lengths
    layer = placed(load_method("fp16"), 8, [0, 0, 0])
    assert layer.row_groups() == [slice(0, 3)]
    layer.progress.padding.starts = [0, 1, 1]
    assert layer.row_groups() == [slice(0, 1), slice(1, 3)]
    layer.progress.padding.starts = None
    for store in layer.stores():
        store.tail.drop_front(slice(0, 2), 1)
        store.tail.drop_back(2, 1)
    assert layer.row_groups() == [slice(0, 2), slice(2, 3)]  # as long, elsewhere in the buffer


def test_positions_of_new_tokens_are_added_behind_those_that_a_method_recorded():
    layer = placed(load_method("fp16"), 6, [0, 0])
    assert layer.ordered(0) is None and layer.positions(0).tolist() == list(range(6))
    layer.order = [torch.tensor([5, 0, 1, 2, 3, 4]), torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5]])]
    zoo.feed(layer, *zoo.random_kv(1, 2))
    assert layer.positions(0).tolist() == [5, 0, 1, 2, 3, 4, 6]
    zoo.feed(layer, *zoo.random_kv(1, 2))
    assert layer.positions(0).tolist() == [5, 0, 1, 2, 3, 4, 6, 7]
    assert layer.positions(1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 2, 3, 4, 5, 6, 7]]
    assert [order.shape[-1] for order in layer.order if order is not None] == [8, 8]
    assert layer.ordered(0) is layer.order[0]


def test_slots_are_hidden_up_to_the_first_that_a_head_still_needs():
    layer = placed(load_method("fp16"), 6, [1, 0])
    layer.order[0] = torch.tensor([1, 2, 4, 3, 5])
    assert [layer.hidden_slots(0, hidden) for hidden in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 4]
    layer.order[1] = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 3, 1, 2, 4, 5]])
    assert [layer.hidden_slots(1, hidden) for hidden in (1, 2, 3, 4)] == [1, 1, 1, 4]


def test_windows_roll_together_only_where_both_stores_are_windows():
    cache = KVCache(load_method("streamingllm", budget=24, position="original"), 1)
    layer = cache.layers[0]
    assert layer.rolling() == [] and layer.segments() == []
    zoo.feed(layer, *zoo.random_kv(30))
    assert layer.rolling() == [store.tail for store in layer.stores()]
    assert placed(load_method("fp16"), 8).rolling() == [] and placed(kivi(), 40).rolling() == []


def test_segments_know_the_queues_of_their_cache():
    layer = placed(kivi(), 40)
    assert [store.packed.packs for store in layer.stores()] == [layer.progress.packs] * 2
    rolling = placed(load_method("streamingllm", budget=24, position="original"), 30)
    assert [window.rolls for window in rolling.rolling()] == [rolling.progress.rolls] * 2


class _PerHead:
    """A basis with a matrix for each of some KV heads, which says which ones it was asked for."""

    heads = 2

    def of_heads(self, first: int, count: int) -> tuple[int, int]:
        return first, count


def test_a_process_alone_has_the_matrices_of_all_heads_and_a_rank_those_of_its_own():
    layer = placed(load_method("fp16"), 4, [0])
    basis = _PerHead()
    layer.method.transform = lambda layer, side: basis
    assert layer.heads == 2 and layer.transform("key") is basis
    layer.heads, layer.progress.rank = 1, (1, 2)
    assert layer.transform("key") == (1, 1)
