"""Packing in the engines' formats by one kernel, in Triton's interpreter: bit for bit what the quantizers write."""

import inspect

import pytest
import torch

from tests.cache.packing import interpret, interpreted, same, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import engine  # noqa: E402
from kvbench.cache.kernels.forms import Form  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.segments import packed  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.engine.llamacpp import IQ4NL, Q8_0, Signed  # noqa: E402
from kvbench.quantizers.engine.nvfp4 import NVFP4  # noqa: E402
from kvbench.quantizers.engine.vllm import Fp8, Fp8PerTokenHead, Int4PerTokenHead, Int8PerTokenHead  # noqa: E402

ALL = slice(None)
FORMATS = [
    (Int8PerTokenHead(), "key"),
    (Fp8PerTokenHead(), "value"),
    (Fp8(0.7), "key"),
    (Int4PerTokenHead(), "value"),
    (Q8_0(), "value"),
    (Signed(4), "key"),
    (NVFP4(), "key"),
    (NVFP4(0.03), "value"),
    (NVFP4(four=True), "value"),
    (Q8_0(even=True), "key"),
]


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
    for a, b in zip(computed.words + computed.params, wanted.words + wanted.params, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def special(channels, dtype):
    """Tokens of zeros, of one value, with ties, tiny, huge, of one sign, and far from 0."""
    x = tokens(12, channels, torch.float32, 3)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = 0.0, 0.75, torch.arange(channels) % 13 * 0.5 - 3
    x[0, 0, 3] *= 1e-5
    x[0, 0, 4] *= 3e3
    x[0, 0, 5].abs_()
    x[0, 0, 6] = -x[0, 0, 6].abs()
    x[0, 0, 7] = 1000 + x[0, 0, 7] * 0.01
    x[0, 0, 8, 1:] = 0.0
    x[0, 0, 10, ::2] = -0.0
    x[0, 0, 9] = torch.tensor([6.0, -6.0]).repeat(channels // 2)
    return x.to(dtype)


@pytest.mark.parametrize(("quantizer", "side"), FORMATS, ids=str)
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(quantizer, side):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    both(quantizer, side, [special(64, torch.bfloat16), *(tokens(n, 64, torch.bfloat16, n) for n in (1, 118))])


@pytest.mark.parametrize(("quantizer", "side"), FORMATS[3:7], ids=str)
def test_fp16_tokens_of_several_rows_and_heads_of_96_channels(quantizer, side):
    both(quantizer, side, [tokens(5, 96, torch.float16, 1, batch=2, heads=2)])


@pytest.mark.parametrize("channels", [80, 256])
@pytest.mark.parametrize(("quantizer", "side"), [*FORMATS[:4], *FORMATS[6:7]], ids=str)
def test_heads_of_80_and_256_channels(quantizer, side, channels):
    both(quantizer, side, [tokens(3, channels, torch.bfloat16, 1)])


def test_tokens_of_many_layers_are_packed_in_one_launch():
    from kvbench.cache.kernels.deferred import Deferred
    from kvbench.cache.kernels.pack_together import together
    from kvbench.cache.watch import Watch, words

    x = [tokens(3, 64, torch.bfloat16, seed) for seed in range(2)]
    watch, queue = Watch(torch.device("cpu")), Deferred()
    for quantizer in (Fp8(), Signed(4)):
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


@pytest.mark.parametrize(("key", "value"), [(Q8_0(), Signed(4)), (Int4PerTokenHead(), Fp8()), (NVFP4(), NVFP4())])
def test_the_token_of_a_captured_step_is_packed_at_places_on_the_device(key, value):
    x = tokens(70, 64, torch.bfloat16, batch=2, heads=2)
    wanted = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    computed = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    for segment in wanted:
        segment.append(ALL, x)
    for segment in computed:
        segment.append(ALL, x[:, :, :69])
        assert segment.advance() == [69, 69] and segment.lengths == [70, 70]
    last = x[:, :, 69:]
    engine.quantize(*computed, last, last, torch.full((2, 2), -1, dtype=torch.int32))
    before = [segment.clone() for segment in computed]
    engine.quantize(*computed, last, last, torch.full((2, 2), 69, dtype=torch.int32))
    for done, alike, earlier in zip(computed, wanted, before, strict=True):
        same(done, alike)
        assert any(not torch.equal(a, b) for a, b in zip(done.words, earlier.words, strict=True))
    assert engine.refuses(*computed) is None
    assert "IQ4NL" in engine.refuses(new(IQ4NL(), "key", x), computed[1])
    assert "float32" in engine.refuses(new(Q8_0(), "key", x.float()), computed[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_by_its_place(bad):
    x = tokens(64, 64, torch.float16, heads=2)
    x[0, 1, 37, 5] = bad
    segment = new(Int8PerTokenHead(), "key", x)
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        segment.append(ALL, x)


def test_no_argument_has_a_name_that_the_launcher_uses_itself():
    """Triton's generated launcher has local variables of these names; the interpreter has no such launcher."""
    from kvbench.cache.kernels import engine_kernel

    for kernel in (engine_kernel.pack_tokens, engine_kernel.pack_tokens_of_layers, engine_kernel.pack_step):
        names = set(inspect.signature(kernel.fn).parameters)
        assert len(names) > 20 and not names & {"params", "options", "specialization"}


def test_what_the_kernel_does_not_serve_is_packed_by_torch():
    x = tokens(3, 64, torch.float16)
    for quantizer in (IQ4NL(), Signed(5)):
        assert served(new(quantizer, "key", x), x) == f"codes of {type(quantizer).__name__}"
