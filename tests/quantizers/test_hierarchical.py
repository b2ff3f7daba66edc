"""QuantSpec's two nibbles against the authors' code, and where that code would break."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.quantizers import HierarchicalQuantizer

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "quantspec.npz")
TAGS = sorted(key for key in GOLDEN.files if "_U_" in key)


@pytest.mark.parametrize("tag", TAGS)
def test_both_nibbles_and_values_of_both_views_equal_the_authors_code(tag):
    side, dtype = tag.split("_U_")
    x = torch.from_numpy(GOLDEN[side]).to(torch.float16 if dtype == "fp16" else torch.float32)
    quantizer = HierarchicalQuantizer(128, "channel" if side == "K" else "token")
    result = quantizer.quantize(x)
    codes = result.codes().to(torch.int16)
    assert np.array_equal((codes >> 4).numpy(), GOLDEN[tag])
    assert np.array_equal(((codes & 15) - 8).numpy(), GOLDEN[f"{side}_L_{dtype}"])
    for name, held in (("scale", result.scale), ("min", result.minimum)):
        assert np.array_equal(held.flatten().numpy(), GOLDEN[f"{side}_{name}_{dtype}"].flatten())
    if f"{side}_deq8_{dtype}" in GOLDEN.files:
        assert np.array_equal(result.dequantize().numpy(), GOLDEN[f"{side}_deq8_{dtype}"])
        assert np.array_equal(quantizer.decode_upper(codes, result.params, x.dtype), GOLDEN[f"{side}_deq4_{dtype}"])


def slow(x: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    """The rule as the authors' torch code states it, in NumPy and the dtype of `x`, each operation rounded."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale = (high - low) / x.dtype.type(15)
    upper = np.rint(np.clip((x - low) / scale, 0, 15))
    lower = np.rint(np.clip((x - (upper * scale + low)) / (scale / x.dtype.type(16)), -8, 7))
    return upper, lower, scale, low


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("side", "axis"), [("K", "channel"), ("V", "token")])
def test_arithmetic_rounds_after_each_operation_in_the_dtype_of_the_input(side, axis, dtype):
    x = GOLDEN[side].astype(dtype)
    grouped = x.reshape(1, 2, 2, 128, 128) if axis == "channel" else x
    upper, lower, scale, low = slow(grouped, 3)
    result = HierarchicalQuantizer(128, axis).quantize(torch.from_numpy(x))
    assert np.array_equal(result.codes().numpy(), (16 * upper + lower + 8).reshape(x.shape))
    values = upper * scale + lower * (scale / dtype(16)) + low
    assert np.array_equal(result.dequantize().numpy(), values.reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_the_error_is_at_most_one_lower_step_and_half_an_upper_one(axis, dtype):
    torch.manual_seed(0)
    x = (torch.randn(2, 3, 256, 64) * torch.rand(2, 3, 1, 64).exp() + 1).to(dtype)
    quantizer = HierarchicalQuantizer(128 if axis == "channel" else None, axis)
    result = quantizer.quantize(x)
    grouped = quantizer.group(x.float())
    both, upper = (
        (quantizer.group(values) - grouped).abs() / quantizer.expand(result.scale.float())
        for values in (
            quantizer.decode(result.codes(), result.params, torch.float32),
            quantizer.decode_upper(result.codes(), result.params, torch.float32),
        )
    )
    slack = 1e-5 if dtype == torch.float32 else 0.02  # the scale itself is rounded to 11 bits
    assert both.max() <= 1 / 16 + slack and upper.max() <= 1 / 2 + slack
    assert both.max() > 0.9 / 16  # +8 lower steps are wanted where +7 is the most there is


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_constant_and_tiny_and_huge_groups_come_back(dtype):
    quantizer = HierarchicalQuantizer(None, "token")
    constant = torch.full((1, 1, 4, 32), -1.2345).to(dtype)
    assert torch.equal(quantizer.quantize(constant).dequantize(), constant)
    tiny = constant.clone()
    tiny[..., 0] += torch.finfo(dtype).eps * 2  # the scale is one of the smallest there are
    assert torch.isfinite(quantizer.quantize(tiny).dequantize()).all()
    if dtype == torch.float16:
        subnormal = torch.zeros(1, 1, 1, 32, dtype=dtype)
        subnormal[..., 0] = 3e-6  # scale / 16 underflows
        assert torch.allclose(quantizer.quantize(subnormal).dequantize(), subnormal, atol=3e-7)
        huge = torch.linspace(-65504, 65504, 32).to(dtype)[None, None, None]  # the range passes 65504
        assert torch.allclose(quantizer.quantize(huge).dequantize().float(), huge.float(), atol=131008 / 15 / 15)


def test_both_planes_are_stored_in_a_byte_an_element():
    x = torch.randn(1, 2, 256, 64).half()
    result = HierarchicalQuantizer(128, "channel").quantize(x)
    assert [plane.numel() for plane in result.packed] == [x.numel() // 2] * 2
    assert result.nbytes == x.numel() + 4 * x.numel() // 128


def test_the_upper_nibbles_are_codes_of_a_quantizer_of_four_bits():
    quantizer = HierarchicalQuantizer(32, "channel")
    assert repr(quantizer) == "HierarchicalQuantizer(group_size=32, axis='channel')"
    assert (quantizer.bits, quantizer.levels, quantizer.kind) == (8, 15, "hierarchical")
    assert repr(quantizer.upper) == "AffineQuantizer(bits=4, group_size=32, axis='channel')"
    x = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).half()
    codes, params = quantizer.encode(x)
    upper, same_params = quantizer.upper.encode(x)
    assert torch.equal(codes >> 4, upper) and all(map(torch.equal, params, same_params))
    decoded = quantizer.decode_upper(codes, params, torch.float16)
    assert torch.equal(decoded, quantizer.upper.decode(upper, params, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_group_without_a_range_has_lower_nibbles_in_the_middle(dtype):
    x = torch.full((1, 1, 2, 16), 1.5).to(dtype)
    result = HierarchicalQuantizer(16, "token").quantize(x)
    assert bool((result.codes() == 8).all()) and bool((result.scale == 0).all())
    x = torch.tensor([0.0, 0.5, 7.0, 15.0]).repeat(4).to(dtype).view(1, 1, 1, 16)  # steps of 1 and 1/16
    result = HierarchicalQuantizer(16, "token").quantize(x)
    assert result.codes().flatten()[:4].tolist() == [8, 15, 7 * 16 + 8, 15 * 16 + 8]  # 0.5: 0 and +7 of 8 sixteenths
    assert result.dequantize().flatten()[:4].tolist() == [0.0, 0.4375, 7.0, 15.0]


def test_bf16_is_decoded_in_fp32_and_rounded_once():
    x = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)) + 3).bfloat16()
    result = HierarchicalQuantizer(32, "token").quantize(x)
    scale, minimum = (p.float().repeat_interleave(32, -1) for p in result.params)
    codes = result.codes().to(torch.int16)
    wanted = (codes >> 4) * scale + ((codes & 15) - 8) * (scale / 16) + minimum
    assert torch.equal(result.dequantize(), wanted.bfloat16()) and result.scale.dtype == torch.float16


def test_a_decoded_upper_nibble_that_would_pass_fp16_leaves_the_right_rest():
    """The step is rounded up to 4368, and 15 steps are more than 65504."""
    x = torch.tensor([0.0, 65504.0]).half().view(1, 1, 1, 2)
    result = HierarchicalQuantizer(2, "token").quantize(x)
    assert result.scale.item() == 4368.0 and result.codes().flatten().tolist() == [8, 15 * 16 + 8]
    assert result.dequantize().flatten().tolist() == [0.0, 65504.0]
