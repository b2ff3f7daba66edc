"""A store: slots through all of its segments."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.store import Store
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
