"""A store: slots through all of its segments.

Positions that grow.
"""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.store import Store, extended
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from tests import zoo

ALL = slice(None)


def full(tokens: torch.Tensor | None = None) -> FullSegment:
    """A full-precision segment for two rows that holds `tokens`."""
    segment = FullSegment(2, 2, 32, torch.float32, "cpu")
    if tokens is not None:
        segment.append(ALL, tokens)
    return segment


def packed(tokens: torch.Tensor, quantizer: AffineQuantizer | None = None) -> PackedSegment:
    """A packed segment for two rows that holds `tokens`, by default of groups along channels."""
    quantizer = quantizer or AffineQuantizer(8, 16, "token")
    segment = PackedSegment(2, 2, 32, torch.float32, "cpu", quantizer=quantizer, side="value")
    segment.append(ALL, tokens)
    return segment


def three() -> tuple[Store, torch.Tensor]:
    """A store of 3 sinks, 20 packed tokens and 7 exact ones, and these tokens."""
    x = zoo.random_kv(30, 2)[0]
    return Store([full(x[:, :, :3]), packed(x[:, :, 3:23]), full(x[:, :, 23:])]), x


def test_new_tokens_need_a_segment_in_full_precision_at_the_end():
    for segments in ([], [packed(torch.zeros(2, 2, 1, 32))], [full(), packed(torch.zeros(2, 2, 1, 32))]):
        with pytest.raises(TypeError, match="the last segment of a store must be a FullSegment"):
            Store(segments)


def test_slots_count_through_all_segments():
    store, x = three()
    assert store.tail is store.segments[2] and store.packed is store.segments[1]
    assert store.length(ALL) == 30 and store.signature(1) == (3, 20, 7)
    assert torch.equal(store.read(ALL, 1, 3, torch.float32), x[:, :, 1:3])
    assert torch.equal(store.read(ALL, 23, 29, torch.float32), x[:, :, 23:29])
    assert store.read(ALL, 23, 29, torch.float16).dtype == torch.float16
    whole = AffineQuantizer(8, 16, "token").quantize(x).dequantize()
    assert torch.equal(store.read(ALL, 5, 23, torch.float32), whole[:, :, 5:23])
    with pytest.raises(IndexError, match="slot 30 does not exist; the store has 30 slots"):
        store.read(ALL, 30, 31, torch.float32)


def test_the_upper_nibbles_alone_are_read_only_where_they_are_asked_for():
    x, quantizer = zoo.random_kv(16, 2)[0], HierarchicalQuantizer(16, "token")
    store = Store([packed(x, quantizer), full(x)])
    codes, params = quantizer.encode(x)
    upper, both = quantizer.decode_upper(codes, params, torch.float32), quantizer.decode(codes, params, torch.float32)
    assert not torch.equal(upper, both)
    assert torch.equal(store.read(ALL, 3, 9, torch.float32, upper=True), upper[:, :, 3:9])
    assert torch.equal(store.read(ALL, 3, 9, torch.float32), both[:, :, 3:9])
    assert torch.equal(store.read(ALL, 16, 20, torch.float32, upper=True), x[:, :, :4])
    plain = packed(x)
    assert torch.equal(plain.read_upper(ALL, 3, 9, torch.float32), plain.read(ALL, 3, 9, torch.float32))


def test_borders_are_where_segments_begin_within_a_range():
    store, _ = three()
    assert store.cuts(ALL, 0, 30) == [0, 3, 23, 30]
    assert store.cuts(ALL, 3, 23) == [3, 23]
    assert store.cuts(ALL, 2, 24) == [2, 3, 23, 24]
    assert store.cuts(ALL, 4, 9) == [4, 9]
    x = zoo.random_kv(5, 2)[0]
    assert Store([full(), full(x), full(), full(), full(x)]).cuts(ALL, 0, 10) == [0, 5, 10]


def test_sinks_are_filled_up_from_the_front_of_the_tail():
    x = zoo.random_kv(9, 2)[0]
    store = Store([full(x[:, :, :2]), full(), full(x[:, :, 2:])])
    store.fill_sinks(ALL, 4, 10)  # a token was dropped: these are not the first ones
    assert store.signature(0) == (2, 0, 7)
    store.fill_sinks(ALL, 4, 9)
    assert store.signature(0) == (4, 0, 5)
    store.fill_sinks(ALL, 4, 9)
    store.fill_sinks(ALL, 3, 9)
    assert store.signature(0) == (4, 0, 5)
    assert torch.equal(store.read(ALL, 0, 4, torch.float32), x[:, :, :4])
    assert torch.equal(store.tail.view(ALL), x[:, :, 4:])
    store.fill_sinks(ALL, 50, 9)  # no more than there are
    assert store.signature(0) == (9, 0, 0) and torch.equal(store.segments[0].read(ALL, 0, 9, torch.float32), x)


def test_a_view_needs_a_single_segment_in_full_precision():
    x = zoo.random_kv(5, 2)[0]
    assert torch.equal(Store([full(), full(x), full()]).only_full(ALL), x)
    assert Store([full(x), full(x)]).only_full(ALL) is None
    assert Store([packed(x), full()]).only_full(ALL) is None
    assert Store([full(), full()]).only_full(ALL) is None


def test_tokens_leave_at_either_end_through_the_segments():
    store, x = three()
    store.drop_back(1, 7 + 2)
    assert store.signature(1) == (3, 18, 0) and store.signature(0) == (3, 20, 7)
    store.drop_back(0, 4)
    assert store.signature(0) == (3, 20, 3)
    store, _ = three()
    whole = store.read(ALL, 3, 23, torch.float32)
    store.drop_front(ALL, 3 + 5)
    assert store.signature(0) == store.signature(1) == (0, 15, 7)
    assert torch.equal(store.read(ALL, 0, 15, torch.float32), whole[:, :, 5:])
    store.drop_front(ALL, 15 + 6)
    assert store.signature(0) == (0, 0, 1) and torch.equal(store.tail.view(ALL), x[:, :, 29:])


def test_a_copy_of_a_store_is_independent():
    store, _ = three()
    twin = store.clone()
    store.drop_front(ALL, 5)
    store.drop_back(0, 2)
    assert [twin.signature(row) for row in (0, 1)] == [(3, 20, 7)] * 2


def test_positions_grow_without_being_copied_each_time():
    positions, moved = torch.randperm(1000), 0
    wanted = positions.tolist()
    for step in range(1000, 3000, 2):
        before = positions.data_ptr()
        older = positions
        positions = extended(positions, torch.arange(step, step + 2))
        moved += positions.data_ptr() != before
        assert len(older) == step
    assert positions.tolist() == wanted + list(range(1000, 3000))
    assert moved <= 4


def test_what_others_hold_stays_as_it_is():
    first = extended(torch.arange(5), torch.arange(5, 6))
    second = extended(first, torch.arange(6, 7))
    third = extended(first, torch.arange(6, 8))
    assert first.tolist() == list(range(6))
    assert second.tolist() == list(range(7)) and third.tolist() == list(range(8))
    shorter = extended(second[:3] + 10, torch.arange(13, 14))
    assert shorter.tolist() == [10, 11, 12, 13] and second.tolist() == list(range(7))


def test_positions_of_heads_and_strided_ones():
    heads = torch.arange(6).view(2, 3)
    assert extended(heads, torch.tensor([[9], [9]])).tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert extended(torch.arange(10)[::2], torch.tensor([7])).tolist() == [0, 2, 4, 6, 8, 7]
    small = extended(torch.arange(3, dtype=torch.int32), torch.tensor([1 << 40]))  # would not fit the shared buffer
    assert small.tolist() == [0, 1, 2, 1 << 40]
    end = torch.arange(300)[290:]  # its buffer has more room, but not behind it
    assert extended(end, torch.tensor([7])).tolist() == [*range(290, 300), 7]


def test_positions_go_on_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        stored = extended(torch.arange(5), torch.tensor([5]))
    with torch.no_grad():
        stored = extended(stored, torch.tensor([6]))
    with torch.inference_mode():
        stored = extended(stored, torch.tensor([7]))
    assert extended(stored, torch.tensor([8])).tolist() == list(range(9))
