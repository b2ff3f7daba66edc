"""Packing of clipped tokens by one kernel, in Triton's interpreter: bit for bit what OSCAR's quantizer writes."""

import pytest
import torch

from tests.cache.packing import interpret, interpreted, same, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels.forms import Form  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.segments import packed  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.oscar import OscarQuantizer  # noqa: E402

ALL = slice(None)


def new(quantizer, side, like):
    shape = {"batch": like.shape[0], "heads": like.shape[1], "channels": like.shape[3]}
    return PackedSegment(**shape, dtype=like.dtype, device="cpu", quantizer=quantizer, side=side, capacity=128)


def both(quantizer, side, steps):
    """Append the steps by the kernel and by torch; every bit of words and parameters must agree."""
    computed, wanted = new(quantizer, side, steps[0]), new(quantizer, side, steps[0])
    for x in steps:
        assert isinstance(served(computed, x), Form), served(computed, x)
        computed.append(ALL, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "served", lambda segment, x: "torch's way")
        for x in steps:
            wanted.append(ALL, x)
    same(computed, wanted)
    return computed


def special(dtype):
    """Tokens of zeros, of one value, with ties, tiny, huge, of one sign, and far from 0."""
    x = tokens(10, 64, torch.float32, 3)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = 0.0, 0.75, torch.arange(64) % 13 * 0.5 - 3
    x[0, 0, 3] *= 1e-5
    x[0, 0, 4] *= 3e3
    x[0, 0, 5].abs_()
    x[0, 0, 6] = -x[0, 0, 6].abs()
    x[0, 0, 7] = 1000 + x[0, 0, 7] * 0.01
    x[0, 0, 8, 1:] = 0.0
    x[0, 0, 9, ::2] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "side", "clip"), [
    (torch.bfloat16, "key", 0.96), (torch.float16, "value", 0.92), (torch.bfloat16, "value", 1.0),
])  # fmt: skip
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(dtype, side, clip):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    both(OscarQuantizer(2, clip), side, [special(dtype), *(tokens(n, 64, dtype, n) for n in (1, 120))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_finite_numbers(dtype):
    """Random bits, and tokens whose range or scale passes what fp16 holds."""
    bits = torch.randint(-(2**15), 2**15, (1, 1, 24, 64), generator=torch.Generator().manual_seed(5)).to(torch.int16)
    x = bits.view(dtype)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    both(OscarQuantizer(2, 0.96), "key", [x, tokens(3, 64, dtype, 6, scale=3e4)])


def test_rows_heads_and_heads_of_128_channels():
    both(OscarQuantizer(2, 0.96), "key", [tokens(5, 128, torch.bfloat16, 1, batch=2, heads=2)])


def test_tokens_of_many_layers_are_packed_in_one_launch():
    from kvbench.cache.kernels.deferred import Deferred
    from kvbench.cache.kernels.pack_together import together
    from kvbench.cache.watch import Watch, words

    x = [tokens(3, 64, torch.bfloat16, seed) for seed in range(2)]
    watch, queue, quantizer = Watch(torch.device("cpu")), Deferred(), OscarQuantizer(2, 0.92)
    segments = [new(quantizer, "value", x[0]) for _ in x]
    for segment in segments:
        segment.watch, segment.packs = (watch, watch.tag(words)), queue
    with together(queue):
        for segment, part in zip(segments, x, strict=True):
            segment.append(ALL, part)
    for segment, part in zip(segments, x, strict=True):
        alone = new(quantizer, "value", part)
        alone.append(ALL, part)
        same(segment, alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_by_its_place(bad):
    x = tokens(40, 64, torch.float16, heads=2)
    x[0, 1, 37, 5] = bad
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        new(OscarQuantizer(2, 0.96), "key", x).append(ALL, x)


def test_what_the_kernel_does_not_serve_is_packed_by_torch():
    x = tokens(3, 64, torch.float16)
    for quantizer in (OscarQuantizer(2, 0.96, lloyd_max=True), OscarQuantizer(4), OscarQuantizer(2, scales="fp32")):
        assert served(new(quantizer, "key", x), x) == "codes of OscarQuantizer"
    wide = tokens(3, 80, torch.float16)
    assert served(new(OscarQuantizer(2, 0.96), "key", wide), wide) == "codes of OscarQuantizer"
