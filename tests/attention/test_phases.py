"""Phases: the description of a layer that kernels get, and layers that no kernel serves."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from kvbench.attention import phases
from kvbench.attention.phases import Format, NotServed, Part, Work, describe_part, divide_into_phases, work
from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.scored import ScoredSegment
from kvbench.cache.store import Store
from kvbench.methods import load_method
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from tests import zoo

ALL = slice(None)


def segment(quantizer, side="key", channels=128, tokens=0):
    made = PackedSegment(1, 1, channels, torch.float16, "cpu", quantizer=quantizer, side=side, capacity=256)
    if tokens:
        made.append(ALL, torch.randn(1, 1, tokens, channels).half())
    return made


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (AtomQuantizer(8, 8, "token"), "groups of 8"),
        (AffineQuantizer(4, 8, "token"), "groups of 8"),
        (AffineQuantizer(4, 256, "channel"), "groups of 256"),
    ],
)
def test_formats_that_no_kernel_is_written_for_are_refused(quantizer, reason):
    with pytest.raises(NotServed, match=reason):
        describe_part(segment(quantizer), 128)


@pytest.mark.parametrize(
    ("quantizer", "form"),
    [
        (AtomQuantizer(4, 128, "token"), Format("atom", 4, "token", 128)),
        (AtomQuantizer(2, 64, "token"), Format("atom", 2, "token", 64)),
        (AffineQuantizer(8, 32, "channel"), Format("affine", 8, "channel", 32)),
        (AffineQuantizer(2, None, "token"), Format("affine", 2, "token", 128)),
        (HierarchicalQuantizer(64, "channel"), Format("hierarchical", 8, "channel", 64)),
    ],
)
def test_formats_that_kernels_read(quantizer, form):
    held = segment(quantizer)
    found = describe_part(held, 128)
    assert found.format == form
    assert [w.data_ptr() for w in found.words] == [w.data_ptr() for w in held.words]
    upper = describe_part(held, 128, upper=True)
    assert len(upper.words) == (1 if form.kind == "hierarchical" else len(held.words))
    assert upper.words[0].data_ptr() == held.words[0].data_ptr()  # the most significant plane comes first
    assert upper.format == (Format("affine", 4, "channel", 64) if form.kind == "hierarchical" else form)


def test_exact_tokens_have_16_or_32_bits():
    with pytest.raises(NotServed, match="no kernel reads keys and values in float64"):
        describe_part(FullSegment(1, 1, 64, torch.float64, "cpu", capacity=4), 64)
    assert describe_part(FullSegment(1, 1, 64, torch.float32, "cpu", capacity=4), 64).format == Format("full", 16)


def stub(keys, values):
    """The attributes of a layer of one row that :func:`divide_into_phases` reads."""
    stores = Store(keys), Store(values)
    method = SimpleNamespace(reading_order=lambda layer, rows: None)
    return SimpleNamespace(batch=1, stores=lambda: stores, pairs=set(), window=None, rope=None, method=method)


def exact(tokens, start=0):
    made = FullSegment(1, 1, 128, torch.float16, "cpu", capacity=tokens + start + 8)
    made.append(ALL, torch.randn(1, 1, tokens + start, 128).half())
    made.drop_front(ALL, start)
    return made


def test_packed_keys_and_values_that_share_no_tiles_are_refused():
    """Two packed segments of keys over one of values: the second begins in the middle of a tile of the values."""

    def make(side, tokens):
        return segment(AffineQuantizer(4, 32, "channel" if side == "key" else "token"), side, 128, tokens)

    with pytest.raises(NotServed, match="begin at different places in their tiles"):
        divide_into_phases(stub([make("key", 64), make("key", 128), exact(5)], [make("value", 192), exact(5)]))
    order, counts = divide_into_phases(
        stub([make("key", 128), make("key", 64), exact(5)], [make("value", 192), exact(5)])
    )
    assert order == [(0, 0), (1, 0), (2, 1)]
    assert counts == [[(0, 0, 128), (0, 128, 64), (0, 0, 5)]]


def test_windows_are_read_from_where_they_begin():
    key = segment(AffineQuantizer(4, 32, "channel"), "key", 128, 64)
    value = segment(AffineQuantizer(4, 32, "token"), "value", 128, 32)
    order, counts = divide_into_phases(stub([key, exact(6, start=3)], [value, exact(38, start=2)]))
    assert order == [(0, 0), (0, 1), (1, 1)]
    assert counts == [[(0, 0, 32), (32, 2, 32), (3, 34, 6)]]


def test_rows_of_equal_lengths_have_their_own_begins():
    """After rounds of speculation windows as long as each other stand at other places of the buffer."""
    keys, values = (FullSegment(3, 1, 128, torch.float16, "cpu", capacity=32) for _ in "kv")
    for segment in (keys, values):
        segment.append(ALL, torch.randn(3, 1, 12, 128).half())
    for row, gone in enumerate((2, 5, 2)):
        keys.drop_front(slice(row, row + 1), gone)
        keys.drop_back(row, 5 - gone)
        values.drop_front(slice(row, row + 1), 1 + row)
        values.drop_back(row, 4 - row)
    layer = stub([keys], [values])
    layer.batch = 3
    assert divide_into_phases(layer) == ([(0, 0)], [[(2, 1, 7)], [(5, 2, 7)], [(2, 3, 7)]])


def test_tiles_count_the_room_that_a_captured_step_may_fill():
    full = Part(Format("full", 16), buffer=torch.zeros(1, 1, 300, 64))
    counts = [[(0, 0, 130), (0, 0, 1)], [(0, 0, 0), (0, 0, 257)]]
    work = Work([(full, full)] * 2, torch.tensor(counts), counts, 1, 64, 64)
    assert work.tiles() == 3 and work.longest() == [130, 257]
    work.room = 128 * 5 + 1
    assert work.tiles() == 6
    work.room = 0
    assert work.tiles() == 3
    assert phases.FIELDS == 3


def test_a_phase_that_has_occurred_stays_though_its_window_is_empty():
    """A kernel is compiled for the phases: an empty line costs nothing, another kernel seconds."""
    key, value = (
        segment(AffineQuantizer(4, 32, "channel"), "key", 128, 64),
        segment(AffineQuantizer(4, 32, "token"), "value", 128, 32),
    )
    layer = stub([key, exact(6)], [value, exact(38)])
    order, _ = divide_into_phases(layer)
    assert order == [(0, 0), (0, 1), (1, 1)] and layer.pairs == set(order)
    layer.stores()[1].segments[0].append(ALL, torch.randn(1, 1, 32, 128).half())
    layer.stores()[1].tail.drop_front(ALL, 32)
    assert divide_into_phases(layer) == (order, [[(0, 0, 64), (0, 0, 0), (0, 32, 6)]])
    empty = stub([exact(0)], [exact(0)])
    assert divide_into_phases(empty) == ([(0, 0)], [[(0, 0, 0)]])  # the phase of new tokens is always there


def test_a_layer_is_described_with_its_own_sizes_and_its_table_shared_with_layers_like_it():
    made = [zoo.new_layer(load_method("kivi", quantizer="int4", residual=32)) for _ in range(2)]
    made[1].progress = made[0].progress
    (keys, _), (values, _) = zoo.random_kv(80, heads=3, channels=64), zoo.random_kv(80, heads=3, channels=128)
    for layer in made:
        zoo.feed(layer, keys.half(), values.half())
    first, second = map(work, made)
    assert (first.heads, first.key_dim, first.value_dim) == (3, 64, 128)
    assert first.room == sum(segment.capacity for segment in made[0].stores()[0].segments) > 80
    sides = stub([exact(6, start=3)], [exact(6)])
    sides.heads, sides.key_dim, sides.value_dim = 1, 128, 128
    room = phases.assembled(sides, [(0, 0)], [[(3, 0, 6)]], torch.zeros(1, 1, 3)).room
    assert room == sides.stores()[0].tail.capacity != sides.stores()[1].tail.capacity  # of the keys
    assert first.counts == [[(0, 0, 48), (48, 0, 16), (0, 16, 16)]] and first.table.tolist() == [
        [list(line) for line in first.counts[0]]
    ]
    assert first.table.dtype == torch.int32 and first.logits.plain
    assert second.table is first.table
    zoo.feed(made[1], keys[:, :, :1].half(), values[:, :, :1].half())
    longer = work(made[1])
    assert longer.table is not first.table and longer.counts[0][-1][2] == 17
    assert work(made[0]).table is first.table
    tables = made[0].progress.tables
    for number in range(70):
        phases.shared_table(made[0], [[(0, 0, number)]])
        assert phases.shared_table(made[0], [[(0, 0, number)]]).tolist() == [[[0, 0, number]]]
    assert len(tables) <= 65  # steps of a long answer leave no table each behind
    made[0].rope = lambda keys, positions: keys
    with pytest.raises(NotServed, match="RoPE"):
        work(made[0])


def test_scales_in_fp32_are_told_from_those_in_fp16():
    made = PackedSegment(
        1, 1, 64, torch.float32, "cpu", quantizer=AffineQuantizer(4, 32, "token"), side="value", capacity=8
    )
    assert describe_part(made, 64).format == Format("affine", 4, "token", 32, scale="fp32")
    with pytest.raises(NotServed, match="the tokens of a SimpleNamespace"):
        describe_part(SimpleNamespace(), 64)


def test_codes_of_a_class_from_outside_are_read_by_no_kernel():
    class Own(AffineQuantizer):
        pass

    with pytest.raises(NotServed, match="codes of a Own"):
        phases.kind_of(Own(4, 32, "token"))


def test_attention_is_received_by_the_segment_that_holds_scores():
    snap = zoo.new_layer(load_method("kivi", quantizer="int4", residual=32))
    zoo.feed(snap, *zoo.random_kv(40))
    with pytest.raises(NotServed, match="kivi does not hold attention with its keys"):
        phases.holder(snap)
    made = ScoredSegment(2, 2, 32, torch.float16, "cpu", capacity=10)
    stores = Store([made]), Store([FullSegment(2, 2, 32, torch.float16, "cpu", capacity=10)])
    layer = SimpleNamespace(stores=lambda: stores, method=SimpleNamespace(observe_group="mean"))
    assert phases.holder(layer) is made
    received = phases.receiving(layer, 3)
    assert received.mean and received.buffer.shape == (2, 2, 1, 3, 10)
    assert phases.receiving(layer, 3).buffer is received.buffer is not phases.receiving(layer, 3, fresh=True).buffer
    layer.method.observe_group = "sum"
    assert not phases.receiving(layer, 1).mean


@pytest.mark.parametrize(
    ("keys", "values", "window", "wanted"),
    [
        ([4, 3], [2, 5], None, {(0, 0): (0, 0, 2), (0, 1): (2, 0, 2), (1, 1): (0, 2, 3)}),
        ([4, 3], [2, 5], 7, {(0, 0): (0, 0, 2), (0, 1): (2, 0, 2), (1, 1): (0, 2, 3)}),
        ([4, 3], [2, 5], 4, {(0, 1): (3, 1, 1), (1, 1): (0, 2, 3)}),
        ([4, 3], [2, 5], 1, {(1, 1): (2, 4, 1)}),
        ([0, 3], [0, 3], None, {(1, 1): (0, 0, 3)}),
        ([3, 0], [1, 2], None, {(0, 0): (0, 0, 1), (0, 1): (1, 0, 2)}),
        ([0], [0], None, {}),
    ],
)
def test_tokens_with_one_format_of_keys_and_one_of_values_are_a_phase(keys, values, window, wanted):
    assert phases.pairs_of_row(keys, values, window) == wanted


def same_description(kept, fresh):
    assert kept.counts == fresh.counts and torch.equal(kept.table, torch.tensor(fresh.counts, dtype=torch.int32))
    assert kept.signature() == fresh.signature() and kept.room == fresh.room
    for mine, other in zip(kept.phases, fresh.phases, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.buffer is b.buffer
            assert list(map(id, a.words)) == list(map(id, b.words))
            assert list(map(id, a.params)) == list(map(id, b.params))


@pytest.mark.parametrize("settings", [{"residual": 32}, {"residual": 32, "sinks": 4, "quantizer": "int4"}])
def test_a_description_is_kept_until_a_buffer_moves(settings):
    """Through growing tails and packed segments: what a kernel gets is what it would get without memory."""
    layer = zoo.new_layer(load_method("kivi", **settings))
    keys, values = zoo.random_kv(200, batch=2)
    zoo.feed(layer, keys[:, :, :20], values[:, :, :20])
    kept = set()
    for n in range(20, 200, 3):
        zoo.feed(layer, keys[:, :, n : n + 3], values[:, :, n : n + 3])
        described = work(layer)
        order, counts = divide_into_phases(layer)
        same_description(described, phases.assembled(layer, order, counts, described.table))
        kept.add(id(described))
    assert 2 <= len(kept) < 20
    before = described
    layer.batch_select_indices(torch.tensor([1]))
    described = work(layer)
    assert described is not before
    same_description(described, phases.assembled(layer, *divide_into_phases(layer), described.table))
    assert work(layer.clone(layer.progress)) is not described
    buffer = weakref.ref(layer.stores()[0].tail.buffer)
    del described, before, kept
    layer.batch_select_indices(torch.arange(layer.batch))
    assert buffer() is None  # a description of the old rows would double a cache's memory


def test_the_upper_nibbles_have_a_description_of_their_own():
    layer = zoo.new_layer(load_method("quantspec"))
    zoo.feed(layer, *zoo.random_kv(300, channels=64))
    both, upper = work(layer).signature(), work(layer, upper=True).signature()
    assert both != upper and work(layer).signature() == both


def test_layers_alike_share_phases_and_table():
    first = zoo.new_layer(load_method("kivi", residual=32))
    second, other = (type(first)(first.method, index, first.progress) for index in (1, 2))
    keys, values = zoo.random_kv(90)
    for layer, count in ((first, 80), (second, 80), (other, 90)):
        zoo.feed(layer, keys[:, :, :count], values[:, :, :count])
    one, two, three = map(work, (first, second, other))
    assert one.table is two.table and one.counts is two.counts and one.phases is not two.phases
    assert three.counts != one.counts and first.pairs == second.pairs
