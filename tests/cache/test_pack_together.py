"""Many layers packed in one launch, in Triton's interpreter: the same bits as layer by layer."""

import os

import pytest
import torch

from tests.attention.interpreter import require

if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the GPU runs it in test_graphs_gpu.py; TRITON_INTERPRET=1 runs this", allow_module_level=True)
require()

from kvbench.cache.kernels import pack, pack_together  # noqa: E402
from kvbench.cache.kernels.jobs import Deferred, programs  # noqa: E402
from kvbench.cache.segments.base import FullSegment  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.cache.watch import Place, Watch  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.methods import load_method  # noqa: E402
from kvbench.methods.kivi import Kivi  # noqa: E402
from kvbench.quantizers import AffineQuantizer, AtomQuantizer  # noqa: E402
from kvbench.quantizers.hierarchical import HierarchicalQuantizer  # noqa: E402

ALL, LAYERS = slice(None), 2


@pytest.fixture(autouse=True, scope="module")
def interpret():
    """Only here: other tests of this process shall not have their CPU caches interpreted."""
    pack.INTERPRET = True
    yield
    pack.INTERPRET = False


@pytest.fixture
def launches(monkeypatch):
    """Layers of each launch."""
    found, plain = [], pack_together.pack_alike

    def counted(group):
        found.append(len(group))
        plain(group)

    monkeypatch.setattr(pack_together, "pack_alike", counted)
    return found


def layers(quantizer, side, dtype, watch, packs=None, rows=2):
    """For each layer a window of random tokens and an empty segment behind a watch."""
    made = []
    for number in range(LAYERS):
        rng = torch.Generator().manual_seed(number)
        window = FullSegment(rows, 1, 64, dtype, "cpu", capacity=160)
        window.append(ALL, torch.randn(rows, 1, 150, 64, generator=rng).to(dtype))
        segment = PackedSegment(rows, 1, 64, dtype, "cpu", quantizer=quantizer, side=side, capacity=256)
        if watch is not None:
            segment.watch = (watch, watch.tag(lambda place, number=number: f"layer {number}: {place}"))
            segment.packs = packs
        made.append((window, segment))
    return made


@pytest.mark.parametrize(
    ("quantizer", "side", "counts", "dtype"),
    [
        (AffineQuantizer(4, None, "token"), "value", [5, 1], torch.bfloat16),
        (AtomQuantizer(4, None, "token"), "key", [1], torch.float16),
        (AffineQuantizer(2, 32), "key", [32], torch.float16),
        (HierarchicalQuantizer(64, "channel"), "key", [64], torch.bfloat16),
    ],
    ids=["int4 values", "atom keys", "int2 keys", "two nibbles"],
)
def test_layers_together_are_layers_one_by_one(quantizer, side, counts, dtype, launches):
    """One launch for all layers; every bit of words and parameters."""
    watch, packs = Watch(torch.device("cpu")), Deferred()
    alone, joint = layers(quantizer, side, dtype, None), layers(quantizer, side, dtype, watch, packs)
    for count in counts:
        for window, segment in alone:
            segment.append(ALL, window.view(ALL)[:, :, :count])
            window.drop_front(ALL, count)
        with pack_together.packing_together(packs):
            for window, segment in joint:
                segment.append(ALL, window.view(ALL)[:, :, :count])
                window.drop_front(ALL, count)
    assert launches == [LAYERS] * len(counts)
    for (_, wanted), (_, found) in zip(alone, joint, strict=True):
        assert found.lengths == wanted.lengths
        for a, b in zip(found.words + found.params, wanted.words + wanted.params, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_layers_that_differ_have_launches_of_their_own(launches):
    """Another length, another format."""
    watch, packs = Watch(torch.device("cpu")), Deferred()
    of_layers = layers(AffineQuantizer(4, None, "token"), "value", torch.float16, watch, packs)
    other = layers(AffineQuantizer(2, None, "token"), "value", torch.float16, watch, packs)
    of_layers[1][1].append(ALL, of_layers[1][0].view(ALL)[:, :, :3])
    with pack_together.packing_together(packs):
        for window, segment in of_layers + other:
            segment.append(ALL, window.view(ALL)[:, :, :1])
    assert sorted(launches) == [1, 1, 2]


def test_the_layer_that_holds_a_nan_is_named():
    """By its own tag, its place in the segment."""
    watch, packs = Watch(torch.device("cpu")), Deferred()
    of_layers = layers(AffineQuantizer(4, None, "token"), "value", torch.float16, watch, packs)
    of_layers[1][0].buffer[1, 0, 2, 5] = float("nan")
    with pack_together.packing_together(packs):
        for window, segment in of_layers:
            segment.append(ALL, window.view(ALL)[:, :, :4])
    with pytest.raises(NonFiniteError, match=r"layer 1: Place\(row=1, head=0, token=2, channel=5\)"):
        watch.check()
    assert Place(1, 0, 2, 5)


@pytest.mark.parametrize(
    ("quantizer", "side", "count"),
    [(AffineQuantizer(2, None, "token"), "value", 2), (AffineQuantizer(2, 32), "key", 1)],
    ids=["by token", "by channel"],
)
def test_warming_up_compiles_what_packs_a_token_alone_too(quantizer, side, count, monkeypatch):
    """Values that leave a window one by one are packed by other programs than a prompt's, alone and together."""
    single, joint = [], []
    monkeypatch.setattr(pack, "_launch_pack_tiles", lambda segment, how, *more: single.append(how))
    monkeypatch.setattr(pack_together, "pack_alike", lambda group: joint.append(group[0].how))
    ((window, segment), _) = layers(quantizer, side, torch.bfloat16, Watch(torch.device("cpu")))
    x = window.view(ALL)[:, :, :1]
    pack.warm_packing(segment, x)
    one = programs(pack.served(segment, x), 5, 1)[0]
    for found in (single, joint):
        assert len(found) == count and one in found


@pytest.mark.parametrize(
    ("quantizer", "side"),
    [
        pytest.param(AffineQuantizer(2, None, "token"), "value", marks=pytest.mark.slow),
        (AffineQuantizer(2, 32), "key"),
    ],
    ids=["by token", "by channel"],
)
def test_warming_up_packs_nothing(quantizer, side):
    """Kernels run over no tokens: buffers, lengths and the record stay as they were, even where x holds NaN."""
    watch = Watch(torch.device("cpu"))
    window, segment = layers(quantizer, side, torch.float16, watch, rows=1)[0]
    segment.append(ALL, window.view(ALL)[:, :, :32])
    before = [buffer.clone() for buffer in segment.words + segment.params]
    window.buffer.fill_(float("nan"))
    pack.warm_packing(segment, window.buffer[:, :, :1])
    assert segment.lengths == [32]
    assert all(torch.equal(a, b) for a, b in zip(before, segment.words + segment.params, strict=True))
    watch.check()


def test_nothing_is_packed_when_the_block_fails(launches):
    """And what comes after is packed at once again."""
    watch, packs = Watch(torch.device("cpu")), Deferred()
    of_layers = layers(AffineQuantizer(4, None, "token"), "value", torch.float16, watch, packs)
    with pytest.raises(RuntimeError), pack_together.packing_together(packs):
        of_layers[0][1].append(ALL, of_layers[0][0].view(ALL)[:, :, :1])
        raise RuntimeError
    assert launches == []
    of_layers[1][1].append(ALL, of_layers[1][0].view(ALL)[:, :, :1])
    assert of_layers[1][1].words[0].any() and launches == []
    with packs.collecting() as jobs, pytest.raises(AssertionError):
        assert packs.jobs is jobs == []
        packs.collecting().__enter__()


def test_a_method_that_settles_its_own_way_does_not_inherit_it():
    """A subclass may read what was packed, or write to where tokens came from."""

    class Other(Kivi):
        def settle(self, layer, rows):
            super().settle(layer, rows)

    kivi = load_method("kivi", quantizer="int4")
    assert kivi.packs_together and load_method("atom").packs_together
    assert not Other(takes=kivi.takes, quantizer=kivi.quantizer).packs_together
    assert load_method("logquant").packs_together and not load_method("partial_logquant").packs_together
    assert not load_method("fp16").packs_together


def test_deferring_in_one_cache_defers_nothing_in_another(launches):
    """Two caches whose steps interleave; segments of a cache that settles layer by layer pack at once."""
    watch, packs = Watch(torch.device("cpu")), Deferred()
    quantizer = AffineQuantizer(4, None, "token")
    one = layers(quantizer, "value", torch.float16, watch, packs)
    other = layers(quantizer, "value", torch.float16, Watch(torch.device("cpu")), Deferred())
    with pack_together.packing_together(packs):
        for window, segment in one + other:
            segment.append(ALL, window.view(ALL)[:, :, :2])
        assert not one[0][1].words[0].any() and other[0][1].words[0].any()
    assert launches == [LAYERS] and one[0][1].words[0].any()
