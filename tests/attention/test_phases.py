"""What kernels are told about a layer, and what no kernel is to be told."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.attention import phases
from kvbench.attention.phases import Format, NotServed, Part, Work, lines, part
from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.store import Store
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from kvbench.quantizers.atom import AtomQuantizer

ALL = slice(None)


def segment(quantizer, side="key", channels=128, tokens=0):
    made = PackedSegment(1, 1, channels, torch.float16, "cpu", quantizer=quantizer, side=side, capacity=256)
    if tokens:
        made.append(ALL, torch.randn(1, 1, tokens, channels).half())
    return made


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (AtomQuantizer(8, 128, "token"), "8-bit codes"),
        (AffineQuantizer(3, 128, "channel"), "3-bit codes"),
        (AffineQuantizer(4, 16, "token"), "groups of 16"),
        (AffineQuantizer(4, 256, "channel"), "groups of 256"),
    ],
)
def test_formats_that_no_kernel_is_written_for_are_refused(quantizer, reason):
    with pytest.raises(NotServed, match=reason):
        part(segment(quantizer), 128)


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
    found = part(held, 128)
    assert found.format == form
    assert [w.data_ptr() for w in found.words] == [w.data_ptr() for w in held.words]
    upper = part(held, 128, upper=True)
    assert len(upper.words) == (1 if form.kind == "hierarchical" else len(held.words))
    assert upper.words[0].data_ptr() == held.words[0].data_ptr()  # the most significant plane comes first
    assert upper.format == (Format("affine", 4, "channel", 64) if form.kind == "hierarchical" else form)


@pytest.mark.parametrize(("dtype", "said"), [(torch.float32, "keys and values in float32"), (torch.float64, "float64")])
def test_exact_tokens_in_half_precision_alone(dtype, said):
    with pytest.raises(NotServed, match=said):
        part(FullSegment(1, 1, 64, dtype, "cpu", capacity=4), 64)


def stub(keys, values):
    """What :func:`lines` asks of a layer of one row."""
    stores = Store(keys), Store(values)
    return SimpleNamespace(batch=1, stores=lambda: stores, pairs=set())


def exact(tokens, start=0):
    made = FullSegment(1, 1, 128, torch.float16, "cpu", capacity=tokens + start + 8)
    made.append(ALL, torch.randn(1, 1, tokens + start, 128).half())
    made.drop_front(ALL, start)
    return made


def test_packed_keys_and_values_that_share_no_tiles_are_refused():
    """Two packed segments of keys beside one of values: the second begins in the middle of a tile of the values."""

    def make(side, tokens):
        return segment(AffineQuantizer(4, 32, "channel" if side == "key" else "token"), side, 128, tokens)

    with pytest.raises(NotServed, match="begin at different places in their tiles"):
        lines(stub([make("key", 64), make("key", 128), exact(5)], [make("value", 192), exact(5)]))
    order, counts = lines(stub([make("key", 128), make("key", 64), exact(5)], [make("value", 192), exact(5)]))
    assert order == [(0, 0), (1, 0), (2, 1)]
    assert counts == [[(0, 0, 128), (0, 128, 64), (0, 0, 5)]]


def test_windows_are_read_from_where_they_begin():
    key = segment(AffineQuantizer(4, 32, "channel"), "key", 128, 64)
    value = segment(AffineQuantizer(4, 32, "token"), "value", 128, 32)
    order, counts = lines(stub([key, exact(6, start=3)], [value, exact(38, start=2)]))
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
    assert lines(layer) == ([(0, 0)], [[(2, 1, 7)], [(5, 2, 7)], [(2, 3, 7)]])


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
