"""Packing of clipped tokens by one kernel, in Triton's interpreter: bit for bit what OSCAR's quantizer writes."""

import pytest
import torch

from tests.cache.packing import both, in_one_launch, interpret, interpreted, new, special, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.oscar import OscarQuantizer  # noqa: E402

ALL = slice(None)


@pytest.mark.parametrize(("dtype", "side", "clip"), [
    (torch.bfloat16, "key", 0.96), (torch.float16, "value", 0.92), (torch.bfloat16, "value", 1.0),
])  # fmt: skip
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(dtype, side, clip):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    both(OscarQuantizer(2, clip), side, [special(10, 64, dtype), *(tokens(n, 64, dtype, n) for n in (1, 120))])


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
    in_one_launch(OscarQuantizer(2, 0.92))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_by_its_place(bad):
    x = tokens(40, 64, torch.float16, heads=2)
    x[0, 1, 37, 5] = bad
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        new(OscarQuantizer(2, 0.96), "key", x).append(ALL, x)


def test_what_the_kernel_does_not_serve_is_packed_by_torch():
    x = tokens(3, 64, torch.float16)
    for quantizer, reason in (
        (OscarQuantizer(2, 0.96, lloyd_max=True), "codes by edges for a Gaussian"),
        (OscarQuantizer(4), "4-bit codes"),
        (OscarQuantizer(2, scales="fp32"), "codes with scales in fp32"),
    ):
        assert served(new(quantizer, "key", x), x) == reason
    wide = tokens(3, 80, torch.float16)
    assert served(new(OscarQuantizer(2, 0.96), "key", wide), wide) == "heads of 80 channels"
