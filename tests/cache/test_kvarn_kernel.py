"""KVarN's packing kernel, in Triton's interpreter, against its quantizer and the layout of tiles."""

import pytest
import torch

from tests.cache.packing import interpret, interpreted, same, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import pack_together  # noqa: E402
from kvbench.cache.kernels.jobs import Deferred, Form  # noqa: E402
from kvbench.cache.kernels.pack import served, warm_packing  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.cache.watch import Watch  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.kvarn import KvarnQuantizer  # noqa: E402

ALL = slice(None)


def segment(quantizer: KvarnQuantizer, side: str, x: torch.Tensor) -> PackedSegment:
    batch, heads, _, channels = x.shape
    return PackedSegment(batch, heads, channels, x.dtype, x.device, quantizer=quantizer, side=side, capacity=256)


@pytest.mark.parametrize(
    ("side", "bits", "tile", "channels", "balance", "iterations"),
    [
        ("key", 4, 128, 64, "kvarn", 8),
        ("value", 2, 64, 64, "kvarn", 3),
        ("value", 3, 128, 64, "kvarn", 1),
        ("key", 8, 64, 64, "norm", 8),
        ("key", 3, 64, 128, "none", 8),
        ("value", 4, 64, 64, "norm", 8),
    ],
)
def test_tiles_equal_those_of_the_quantizer(side, bits, tile, channels, balance, iterations):
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(2, 2, 192 if tile == 64 else 256, channels, generator=generator)
    x[..., 5] *= 8
    x *= (0.5 * torch.randn(2, 2, x.shape[2], 1, generator=generator)).exp()
    x[1, 0, 3] = 0 if balance != "kvarn" else 0.01  # a token of zeros leaves the best state to rounding
    x = x.half()  # with as few bits as bf16 has, elements lie exactly between two codes
    quantizer = KvarnQuantizer(bits, tile, "channel" if side == "key" else "token", balance, iterations)
    packed = segment(quantizer, side, x)
    assert isinstance(served(packed, x), Form)
    warm_packing(packed, x[:, :, :1])  # writes nothing
    for first, last in ((0, tile), (tile, x.shape[2])):  # the second append begins in a tile of 128
        packed.append(ALL, x[:, :, first:last])
    codes, params = quantizer.encode(x)
    difference = (packed.codes(ALL, 0, x.shape[2]) - codes.to(torch.int16)).abs()
    assert difference.max() <= 1 and difference.float().mean() <= 1e-4
    for stored, wanted in zip(packed.params, params, strict=True):
        steps = stored[:, :, : wanted.shape[2]].contiguous().view(torch.int16).int() - wanted.view(torch.int16).int()
        assert steps.abs().max() <= 1


def test_what_is_not_finite_is_found():
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    x[0, 1, 7, 9] = torch.inf
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 7, 9\)"):
        segment(KvarnQuantizer(4, 64, "channel"), "key", x).append(ALL, x)


def test_other_tokens_are_left_to_torch():
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    plain, clipped = KvarnQuantizer(4, 64, "channel"), KvarnQuantizer(4, 64, "channel", quantile=0.1)
    assert isinstance(served(segment(plain, "key", x), x), Form)
    for quantizer, y in ((clipped, x), (plain, x.float()), (plain, x[..., :48])):
        assert isinstance(served(segment(quantizer, "key", y), y), str)


def test_layers_that_pack_together_hold_what_they_hold_alone():
    x = tokens(64, 64, torch.float16, batch=2, heads=2)
    quantizer = KvarnQuantizer(2, 64, "token")
    alone, queue = [segment(quantizer, "value", x * n) for n in (1, 2)], Deferred()
    layers, watch = [segment(quantizer, "value", x * n) for n in (1, 2)], Watch(x.device)
    for number, (one, layer) in enumerate(zip(alone, layers, strict=True), 1):
        one.append(ALL, x * number)
        layer.watch, layer.packs = (watch, watch.tag(str)), queue
    with pack_together.packing_together(queue):
        for number, layer in enumerate(layers, 1):
            layer.append(ALL, x * number)
    for one, layer in zip(alone, layers, strict=True):
        same(layer, one)
