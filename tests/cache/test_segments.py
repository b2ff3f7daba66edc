"""Buffers that grow, slide and forget, row by row."""

import pytest
import torch

from kvbench.cache.segments import interface
from kvbench.cache.segments.base import FullSegment, all_equal, uniform_rows
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.segments.scored import ScoredSegment
from kvbench.quantizers import AffineQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

ALL = slice(None)
SHAPE = {"batch": 2, "heads": 2, "channels": 32, "dtype": torch.float32, "device": "cpu"}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, count, 32, generator=torch.Generator().manual_seed(seed))


def test_a_window_slides_through_its_buffer_without_growing():
    segment = FullSegment(**SHAPE, capacity=40, slack=8)
    x = tokens(500)
    for t in range(500):
        segment.append(ALL, x[:, :, t : t + 1])
        if segment.length(ALL) > 32:
            segment.drop_front(ALL, 1)
        first = max(0, t - 31)
        assert torch.equal(segment.view(ALL), x[:, :, first : t + 1])
    assert segment.capacity == 40


def test_rows_may_differ_in_length_and_growth_keeps_all_of_them():
    segment = FullSegment(**SHAPE, capacity=4)
    x = tokens(64)
    one, two = slice(0, 1), slice(1, 2)
    segment.append(one, x[one, :, :3])
    segment.append(two, x[two, :, :20])
    segment.drop_front(two, 5)
    segment.append(one, x[one, :, 3:60])
    segment.append(two, x[two, :, 20:64])
    assert torch.equal(segment.view(one), x[one, :, :60])
    assert torch.equal(segment.view(two), x[two, :, 5:64])
    segment.drop_back(1, 4)
    assert torch.equal(segment.view(two), x[two, :, 5:60])


def test_keep_chooses_per_head():
    segment = FullSegment(**SHAPE)
    x = tokens(10)
    segment.append(ALL, x)
    index = torch.tensor([[0, 3, 9], [1, 2, 8]])
    segment.keep(ALL, index)
    assert torch.equal(segment.view(ALL)[:, 0], x[:, 0, [0, 3, 9]])
    assert torch.equal(segment.view(ALL)[:, 1], x[:, 1, [1, 2, 8]])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("side", "axis"), [("key", "channel"), ("key", "token"), ("value", "token")])
def test_packed_blocks_equal_the_quantizer_whatever_their_boundaries(bits, side, axis):
    quantizer = AffineQuantizer(bits, 16, axis)
    segment = PackedSegment(**SHAPE, quantizer=quantizer, side=side)
    x = tokens(320)
    start = 0
    for count in (16, 112, 128, 32, 32) if axis == "channel" else (1, 15, 130, 3, 171):
        segment.append(ALL, x[:, :, start : start + count])
        start += count
    whole = quantizer.quantize(x)
    assert torch.equal(segment.codes(ALL, 0, 320), whole.codes().to(torch.int16))
    for first, last in ((0, 320), (5, 6), (100, 200), (17, 319)):
        assert torch.equal(segment.read(ALL, first, last, torch.float32), whole.dequantize()[:, :, first:last])
    used = segment.used(0)
    assert used["codes"] == 2 * 320 * 32 * bits // 8
    assert used["scales"] * 2 == sum(p.numel() * 4 for p in whole.params)


def test_select_and_clone_are_independent_copies():
    segment = PackedSegment(**SHAPE, quantizer=AffineQuantizer(4, 16), side="key")
    x = tokens(64)
    segment.append(ALL, x[:, :, :32])
    twin = segment.clone()
    segment.append(ALL, x[:, :, 32:])
    assert twin.lengths == [32, 32]
    assert segment.lengths == [64, 64]
    twin.append(ALL, -x[:, :, 32:])
    assert not torch.equal(twin.codes(ALL, 32, 64), segment.codes(ALL, 32, 64))
    segment.select(torch.tensor([1, 1, 0]))
    assert torch.equal(segment.codes(slice(0, 1), 0, 64), segment.codes(slice(1, 2), 0, 64))
    assert segment.lengths == [64, 64, 64]


def test_places_of_a_step_hold_where_one_row_makes_the_buffer_grow():
    """A row that had room moves too: its window began further back in the old buffer."""
    segment = FullSegment(**SHAPE, capacity=20, slack=0)
    segment.append(slice(0, 1), tokens(10)[:1])
    segment.drop_front(slice(0, 1), 5)
    segment.append(slice(1, 2), tokens(20)[1:])
    places = segment.advance(2)
    assert segment.capacity > 20 and segment.lengths == [7, 22]
    for row, place in enumerate(places):
        segment.buffer[row, :, place : place + 2] = 7.0
        stored = segment.view(slice(row, row + 1))
        assert bool((stored[:, :, -2:] == 7.0).all()) and not bool((stored[:, :, :-2] == 7.0).any())


def test_sinks_that_begin_to_move_at_different_steps_are_turned_from_what_came():
    """Two rows, one of which rolled before: each keeps the sinks that it was given."""
    segment = RollingSegment(**SHAPE, capacity=40, sinks=2, turn=lambda keys, by: keys + by)
    x = tokens(9)
    segment.append(slice(0, 1), x[:1])
    segment.roll(slice(0, 1), 1, 1)
    segment.append(slice(1, 2), x[1:])
    segment.drop_front(slice(1, 2), 1)  # to the same place of the buffer
    segment.roll(ALL, 1, 2)
    assert segment.lengths == [7, 7]
    assert torch.equal(segment.view(slice(0, 1))[:, :, :2], x[:1, :, :2] + 2)
    assert torch.equal(segment.view(slice(1, 2))[:, :, :2], x[1:, :, 1:3] + 2)


def test_copies_and_chosen_rows_know_which_sinks_have_been_turned():
    """A window that has not rolled yet keeps its sinks when it does."""
    x = tokens(8)
    segment = RollingSegment(**SHAPE, capacity=40, sinks=2, turn=lambda keys, by: keys + by)
    segment.append(ALL, x)
    twin = segment.clone()
    twin.roll(ALL, 1, 1)
    for other in (segment, twin):
        if other is segment:
            other.roll(slice(0, 1), 1, 1)
        other.select(torch.tensor([1, 0]))
    segment.roll(slice(0, 1), 1, 1)
    for other in (segment, twin):
        assert other.lengths == [7, 7] and other.turned == [1, 1]
        assert torch.equal(other.view(ALL), torch.cat([x[[1, 0], :, :2] + 1, x[[1, 0], :, 3:]], 2))


def test_buffers_made_in_inference_mode_may_be_written_outside_of_it():
    with torch.inference_mode():
        segment = FullSegment(**SHAPE)
        segment.append(ALL, tokens(3))
        twin = segment.clone()
    for s in (segment, twin):
        s.append(ALL, tokens(3))
        assert s.length(ALL) == 6


def test_uniform_rows():
    assert list(uniform_rows([1, 1, 1])) == [slice(0, 3)]
    assert list(uniform_rows([1, 2, 2])) == [slice(0, 1), slice(1, 3)]
    assert list(uniform_rows([1, 2, 2, 1])) == [slice(0, 1), slice(1, 3), slice(3, 4)]
    assert list(uniform_rows([])) == []
    assert all_equal([]) and all_equal([3, 3]) and not all_equal([3, 3, 4])


def test_a_buffer_grows_by_half_of_what_it_needs_or_by_its_slack():
    segment, sizes = FullSegment(**SHAPE, capacity=4, slack=8), []
    for count in (3, 5, 20, 1):
        segment.append(ALL, tokens(count))
        sizes.append(segment.capacity)
    assert sizes == [4, 16, 42, 42]
    first = FullSegment(**SHAPE, slack=8)
    first.append(ALL, tokens(30))
    assert first.capacity == 38  # a prompt has its room, and the slack
    assert FullSegment(**SHAPE).slack == 64
    first.append(ALL, tokens(0))
    assert first.lengths == [30, 30]
    assert first.used(1) == {"window": 30 * 2 * 32 * 4} and first.buffers() == [("window", first.buffer)]
    assert first.read(ALL, 3, 9, torch.float16).dtype == torch.float16
    assert torch.equal(first.read(ALL, 3, 9, torch.float32), tokens(30)[:, :, 3:9])


def test_chosen_tokens_are_appended_in_their_order_and_the_buffer_grows_once(monkeypatch):
    monkeypatch.setattr(interface, "GATHERED", 4)
    segment, x, index = FullSegment(**SHAPE, capacity=4, slack=8), tokens(30), torch.randperm(30)[:10]
    segment.append_chosen(ALL, x, index)
    assert torch.equal(segment.view(ALL), x[:, :, index]) and segment.capacity == 18
    segment.append_chosen(ALL, x, index[:0])
    assert segment.lengths == [10, 10]


def test_an_empty_window_begins_at_the_front_of_its_buffer_again():
    segment = FullSegment(**SHAPE, capacity=10)
    segment.append(ALL, tokens(6))
    segment.drop_front(ALL, 2)
    assert segment.starts == [2, 2]
    segment.drop_front(ALL, 4)
    assert (segment.starts, segment.lengths) == ([0, 0], [0, 0])


def test_places_of_a_step_lie_behind_the_tokens_of_each_row():
    segment = FullSegment(**SHAPE, capacity=12, slack=0)
    segment.append(ALL, tokens(8))
    segment.drop_front(slice(0, 1), 3)
    segment.drop_back(1, 2)
    assert segment.advance(4) == [8, 6] and segment.lengths == [9, 10] and segment.capacity == 12
    assert segment.advance(2) == [9, 10]  # only the first row has no room behind it: it moves to the front
    assert segment.starts == [0, 0] and segment.capacity == 12


@pytest.mark.parametrize(("window", "tiles"), [(64, 3), (128, 3), (256, 4), (384, 3)])
def test_every_tile_has_room_for_its_own_parameters(window, tiles):
    """Kernels find the parameters of a tile by its number, so windows of several tiles are not cut."""
    quantizer = WindowedQuantizer(4, window, 64)
    segment = PackedSegment(**SHAPE, quantizer=quantizer, side="key", capacity=300)
    for count in (0, 4 * window):
        if count:
            segment.append(ALL, tokens(count))
        room = segment.words[0].shape[2]
        assert segment.params[0].shape[2] * quantizer.group_size == room * 128
        tiles = tiles if not count else max(tiles, 4 * window // 128)
        assert room == tiles and segment.capacity == tiles * 128


def test_a_buffer_that_grows_begins_its_window_at_its_front():
    segment, x = FullSegment(**SHAPE, capacity=20, slack=0), tokens(90)
    segment.append(ALL, x[:, :, :20])
    segment.drop_front(ALL, 5)
    segment.append(ALL, x[:, :, 20:60])
    assert torch.equal(segment.view(ALL), x[:, :, 5:60])
    segment.append(ALL, x[:, :, 60:])
    assert torch.equal(segment.view(ALL), x[:, :, 5:])


def test_rows_take_the_begin_of_their_windows_along():
    segment, x = FullSegment(**SHAPE, capacity=20), tokens(12)
    segment.append(ALL, x)
    segment.drop_front(slice(0, 1), 4)
    segment.drop_back(1, 4)  # as long as the other row, and further back in the buffer
    segment.select(torch.tensor([1, 0]))
    assert torch.equal(segment.view(slice(0, 1)), x[1:, :, :8])
    assert torch.equal(segment.view(slice(1, 2)), x[:1, :, 4:])


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("bits", "axis"), [(2, "channel"), (3, "token"), (4, "token"), (8, "channel")])
@pytest.mark.parametrize("gone", [16, 128, 208, 320])
def test_packed_tokens_leave_at_the_front_and_the_rest_stays_as_it_is(side, bits, axis, gone):
    quantizer, x = AffineQuantizer(bits, 16, axis), tokens(400)
    segment = PackedSegment(**SHAPE, quantizer=quantizer, side=side)
    segment.append(ALL, x[:, :, :320])
    before = segment.read(ALL, gone, 320, torch.float32)
    segment.drop_front(slice(0, 1), gone)
    assert segment.lengths == [320 - gone, 320]
    one = slice(0, 1)
    assert torch.equal(segment.read(one, 0, 320 - gone, torch.float32), before[:1])
    assert torch.equal(segment.read(slice(1, 2), gone, 320, torch.float32), before[1:])
    segment.append(one, x[:1, :, 320:])
    new = quantizer.quantize(x[:1, :, 320:]).dequantize()
    assert torch.equal(segment.read(one, 320 - gone, 400 - gone, torch.float32), new)
    if axis == "channel":
        with pytest.raises(ValueError, match="17 tokens are not a multiple of the group size, 16"):
            segment.drop_front(one, 17)


@pytest.mark.parametrize("bits", [3, 4])
def test_moved_tokens_take_their_codes_scales_and_minima_along(bits):
    segment = PackedSegment(**SHAPE, quantizer=AffineQuantizer(bits, 16, "token"), side="value")
    segment.append(ALL, tokens(200) + torch.arange(200)[:, None])  # no token has another's minimum
    before = segment.read(ALL, 0, 200, torch.float32)
    index = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    segment.permute(slice(1, 2), 100, index)
    after = segment.read(ALL, 0, 200, torch.float32)
    assert torch.equal(after[1, :, 100:160], before[1, :, 100 + index])
    assert torch.equal(after[1, :, :100], before[1, :, :100]) and torch.equal(after[1, :, 160:], before[1, :, 160:])
    assert torch.equal(after[0], before[0])


def test_attention_to_tokens_that_were_taken_back_is_forgotten():
    """Of a step of three, two stay or one; what the others gave and received is in no score."""
    segment = ScoredSegment(**SHAPE, capacity=16)
    received = torch.rand(2, 2, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    segment.append(ALL, tokens(8))
    segment.observe(ALL, received)
    segment.drop_back(0, 1)
    segment.drop_back(1, 2)
    for row, left in ((0, 2), (1, 1)):
        scores = segment.commit(slice(row, row + 1))
        assert torch.equal(scores[0, ..., 0], received[row, :, 0, :left, : 5 + left].sum(-2))
    segment.append(slice(0, 1), tokens(1)[:1])
    assert not segment.commit(slice(0, 1))[:, :, -1].any()


def test_blocks_of_several_groups_leave_at_the_front_with_their_parameters():
    segment = PackedSegment(**SHAPE, quantizer=WindowedQuantizer(4, 85), side="key")  # groups of 43 and 42
    x = torch.randn(SHAPE["batch"], SHAPE["heads"], 4 * 85, SHAPE["channels"])
    x = (x * torch.arange(1, 9).repeat_interleave(torch.tensor([43, 42] * 4))[:, None]).to(SHAPE["dtype"])
    segment.append(ALL, x)
    whole = segment.read(ALL, 0, 340, SHAPE["dtype"])
    assert torch.equal(segment.read(ALL, 100, 300, SHAPE["dtype"]), whole[:, :, 100:300])
    segment.drop_front(ALL, 170)
    assert torch.equal(segment.read(ALL, 0, 170, SHAPE["dtype"]), whole[:, :, 170:])


def test_room_beyond_the_longest_row_is_given_back():
    segment = FullSegment(2, 1, 4, torch.float32, "cpu", capacity=20)
    x = torch.randn(2, 1, 9, 4)
    segment.append(slice(None), x)
    segment.drop_front(slice(0, 1), 3)
    segment.trim(20)
    assert segment.capacity == 20 and segment.starts == [3, 0]
    for asked, room in ((15, 15), (15, 15), (2, 9)):
        segment.trim(asked)
        assert segment.capacity == room and segment.lengths == [6, 9]
        assert torch.equal(segment.view(slice(0, 1)), x[:1, :, 3:]) and torch.equal(segment.view(slice(1, 2)), x[1:])
    empty = FullSegment(0, 1, 4, torch.float32, "cpu", capacity=3)
    empty.trim(1)
    assert empty.capacity == 1
