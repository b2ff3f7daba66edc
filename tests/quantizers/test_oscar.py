"""OSCAR's quantizer: equal to the authors' serving kernel, and what is stored of its parameters."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers.oscar import OscarQuantizer, threshold

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "new" / "oscar.npz")
CASES = [(side, clip, "uni") for side, clip in (("K", 0.96), ("K", 1.0), ("V", 0.92), ("V", 1.0))]
CASES += [("K", 0.96, "lm"), ("K", 1.0, "lm")]


def golden(what: str, side: str, clip: float, levels: str) -> torch.Tensor:
    """An array of the authors' kernel as [head, token, channel] or [head, token]."""
    name = f"enc_{what}_{side}_clip{100 * clip % 100:02.0f}_{levels}_D64"
    return torch.from_numpy(GOLDEN[name]).transpose(0, 1)


def dequantized(*case) -> torch.Tensor:
    """The authors' kernel's output is stored for two cases, and computed by their formula for the others."""
    codes, scale, zero = (golden(what, *case) for what in ("codes", "scale", "zero"))
    computed = (codes - zero[..., None]) * scale[..., None]
    if case[1:] in ((0.96, "uni"), (0.92, "uni")):
        assert torch.equal(golden("deq", *case), computed)
    return computed


def error(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest element of the token."""
    return float(((values - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)).max())


def rows(side: str) -> torch.Tensor:
    """Rotated rows, the input of the authors' kernel, [head, token, channel]."""
    return torch.from_numpy(GOLDEN[f"enc_rows_{side}_D64"]).transpose(0, 1)


@pytest.mark.parametrize(("side", "clip", "levels"), CASES)
def test_codes_scales_and_zeros_are_the_authors(side, clip, levels):
    case = (side, clip, levels)
    quantizer = OscarQuantizer(2, clip, lloyd_max=levels == "lm", scales="fp32")
    encoded = quantizer.quantize(rows(side))
    scale, zero = encoded.params
    assert scale.dtype == zero.dtype == torch.float32
    assert torch.equal(encoded.codes(), golden("codes", *case))
    # Lloyd-Max: mean and variance are sums, whose order differs
    close = {"rtol": 0, "atol": 0} if levels == "uni" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(scale[..., 0], golden("scale", *case), **close)
    torch.testing.assert_close(zero[..., 0], golden("zero", *case), **close)
    assert error(encoded.dequantize(), dequantized(*case)) <= 1e-6


@pytest.mark.parametrize(("side", "clip", "levels"), CASES)
def test_scale_and_minimum_stand_for_the_same_values(side, clip, levels):
    """Kernels read x^ = code * scale + minimum: in fp32 the same numbers, in 16-bit models rounded to fp16."""
    expected = dequantized(side, clip, levels)
    quantizer = OscarQuantizer(2, clip, lloyd_max=levels == "lm")
    encoded = quantizer.quantize(rows(side))
    assert torch.equal(encoded.codes(), golden("codes", side, clip, levels)) and quantizer.kind == "affine"
    assert error(encoded.dequantize(), expected) <= 2e-6
    half = quantizer.quantize(rows(side).bfloat16())
    assert [param.dtype for param in half.params] == [torch.float16] * 2
    assert torch.equal(half.codes(), encoded.codes())  # the rows are exact in bf16
    back = quantizer.decode(half.codes(), half.params, torch.float32)
    assert error(back, expected) <= 2**-10 * 4


def test_the_threshold_is_an_element_and_not_interpolated():
    x = torch.tensor([[-8.0, 1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0]])
    for clip, limit in ((0.96, 8.0), (0.9, 8.0), (0.874, 7.0), (0.5, 5.0), (0.0, 1.0)):
        assert threshold(x, clip).tolist() == [[limit]]
    codes, (_, minimum) = OscarQuantizer(2, 0.5).encode(x)
    assert minimum.tolist() == [[-5.0]] and codes.tolist() == [[0, 2, 2, 1, 3, 3, 0, 3]]


def test_constant_tokens_and_numbers_that_are_not_finite():
    x = torch.tensor([[0.75] * 8, [0.0] * 8, [-3.0e-5] * 8])
    for quantizer in (OscarQuantizer(2, 0.96), OscarQuantizer(2, 0.96, scales="fp32")):
        torch.testing.assert_close(quantizer.quantize(x).dequantize(), x, rtol=0, atol=1e-7)
        torch.testing.assert_close(quantizer.quantize(x.half()).dequantize(), x.half(), rtol=1e-3, atol=1e-7)
    x[1, 3] = float("inf")
    with pytest.raises(NonFiniteError, match=r"index \(1, 3\)"):
        OscarQuantizer(2, 0.96).quantize(x)


@pytest.mark.parametrize("scales", ["fp16", "fp32"])
def test_code_0_stands_for_the_minimum(scales):
    quantizer = OscarQuantizer(2, 0.96, scales=scales)
    _, params = quantizer.encode(rows("V"))
    lowest = quantizer.decode(torch.zeros(rows("V").shape, dtype=torch.uint8), params, torch.float32)
    minimum = quantizer.minimum(params).float()
    assert minimum.shape == lowest[..., :1].shape
    torch.testing.assert_close(lowest, minimum.expand_as(lowest), rtol=1e-6, atol=1e-6)
