"""Packing in the engines' formats by one kernel, in Triton's interpreter: bit for bit what the quantizers write."""

import inspect

import pytest
import torch

from tests.cache.packing import both, in_one_launch, interpret, interpreted, new, same, special, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import engine  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
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


@pytest.mark.parametrize(("quantizer", "side"), FORMATS, ids=str)
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(quantizer, side):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    x = special(11, 64, torch.bfloat16)
    x[0, 0, 10] = torch.tensor([6.0, -6.0]).repeat(32)
    both(quantizer, side, [x, *(tokens(n, 64, torch.bfloat16, n) for n in (1, 118))])


@pytest.mark.parametrize(("quantizer", "side"), FORMATS[3:7], ids=str)
def test_fp16_tokens_of_several_rows_and_heads_of_96_channels(quantizer, side):
    both(quantizer, side, [tokens(5, 96, torch.float16, 1, batch=2, heads=2)])


@pytest.mark.parametrize("channels", [80, 256])
@pytest.mark.parametrize(("quantizer", "side"), [*FORMATS[:4], *FORMATS[6:7]], ids=str)
def test_heads_of_80_and_256_channels(quantizer, side, channels):
    both(quantizer, side, [tokens(3, channels, torch.bfloat16, 1)])


def test_tokens_of_many_layers_are_packed_in_one_launch():
    for quantizer in (Fp8(), Signed(4)):
        in_one_launch(quantizer)


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
    for quantizer, reason in ((IQ4NL(), "codes of IQ4NL"), (Signed(5), "5-bit codes")):
        assert served(new(quantizer, "key", x), x) == reason
