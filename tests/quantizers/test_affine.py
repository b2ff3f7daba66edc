"""KIVI's and Atom's quantizers against the authors' code, and the traps that their code has."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kvbench.quantizers
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.quantizers import AffineQuantizer, AtomQuantizer, Quantized
from kvbench.quantizers.affine import param_dtype
from kvbench.quantizers.spec import PLANES

GOLDEN = Path(__file__).parents[1] / "golden"
KIVI, ATOM = np.load(GOLDEN / "kivi.npz"), np.load(GOLDEN / "atom.npz")
KIVI_TAGS = sorted(key for key in KIVI.files if "_codes_" in key)
ATOM_TAGS = sorted(key for key in ATOM.files if "_deq_" in key)


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array).to(torch.float16 if dtype == "fp16" else torch.float32)


@pytest.mark.parametrize("tag", KIVI_TAGS)
def test_codes_scales_and_values_equal_kivis_code(tag):
    side, rest = tag.split("_codes_")
    dtype, bits, group = rest.split("_")
    quantizer = AffineQuantizer(int(bits[1:]), int(group[1:]), "channel" if side == "K" else "token")
    result = quantizer.quantize(as_tensor(KIVI[f"{side}_fp16"], dtype))
    assert np.array_equal(result.codes().numpy(), KIVI[tag])
    assert np.array_equal(result.scale.numpy(), KIVI[f"{side}_scale_{rest}"])
    assert np.array_equal(result.minimum.numpy(), KIVI[f"{side}_mn_{rest}"])
    assert np.array_equal(result.dequantize().numpy(), KIVI[f"{side}_deq_{rest}"])


@pytest.mark.parametrize("tag", ATOM_TAGS)
def test_values_equal_atoms_code(tag):
    side, parts = tag[0], tag.split("_")
    quantizer = AtomQuantizer(int(parts[2][1:]), 64 if "g64" in parts else None, "token")
    result = quantizer.quantize(as_tensor(ATOM[side], parts[-1]))
    assert np.array_equal(result.dequantize().numpy().astype(np.float32), ATOM[tag].astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("group", "zero", "codes"),
    [
        ((-8.0, -7.0, -6.0, -5.0), 3, [0, 0, 0, 0]),
        ((5.0, 6.0, 7.0, 8.0), 0, [3, 3, 3, 3]),
        ((-1.0, 0, 1, 2), 1, [0, 1, 2, 3]),
    ],
)
def test_atoms_zero_point_is_one_of_the_codes_and_groups_on_one_side_of_0_saturate(dtype, group, zero, codes):
    result = AtomQuantizer(2, 4, "token").quantize(torch.tensor(group).to(dtype).view(1, 1, 1, 4))
    scale, stored = result.params
    assert (scale.item(), stored.item()) == (1.0, zero)
    assert result.codes().flatten().tolist() == codes
    assert result.dequantize().flatten().tolist() == [code - zero for code in codes]


@pytest.mark.parametrize("quantizer_class", [AffineQuantizer, AtomQuantizer])
def test_the_minimum_of_a_group_is_the_value_of_code_0(quantizer_class):
    x = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(3))
    x[..., 0] = -4.0  # the lowest value of every group, so that one element has the code 0
    result = quantizer_class(3, 32, "token").quantize(x)
    assert bool((result.codes()[..., 0] == 0).all())
    assert torch.equal(result.minimum, result.dequantize()[..., :1])


@pytest.mark.parametrize("quantizer_class", [AffineQuantizer, AtomQuantizer])
@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize(("dtype", "param_bytes"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float32, 4)])
def test_storage_is_exactly_bits_over_8_an_element(quantizer_class, bits, dtype, param_bytes):
    x = torch.randn(2, 3, 64, 32).to(dtype)
    result = quantizer_class(bits, 32, "token").quantize(x)
    assert result.nbytes == x.numel() * bits // 8 + 2 * param_bytes * x.numel() // 32
    assert int(result.codes().max()) <= 2**bits - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_a_constant_group_round_trips_exactly(dtype, axis):
    x = torch.full((1, 2, 64, 64), -1.2345).to(dtype)
    assert torch.equal(AffineQuantizer(2, 32, axis).quantize(x).dequantize(), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", PLANES)
def test_error_is_at_most_half_a_step_over_the_whole_range_of_fp16(dtype, bits):
    for size in (1e-3, 1.0, 3e4):
        x = (torch.rand(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1).mul(size).to(dtype)
        result = AffineQuantizer(bits, 32, "channel").quantize(x)
        assert torch.isfinite(result.dequantize()).all()
        step = result.scale.float().repeat_interleave(32, -2)
        # beside half a step: the stored scale is rounded (lost at the top code), and so is the output
        scale_error = 0.0 if dtype == torch.float32 else (2**bits - 1) * (step * 2**-11 + 2**-25)
        allowed = 0.5 * step + scale_error + 4 * torch.finfo(dtype).eps * size
        assert bool(((result.dequantize().float() - x.float()).abs() <= allowed).all())


@pytest.mark.parametrize("quantizer_class", [AffineQuantizer, AtomQuantizer])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_past_the_range_of_fp16_stay_finite(quantizer_class, dtype):
    x = (torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(1)) * 6e4).to(dtype)
    x = x.clamp(-6.5e4, 6.5e4) if dtype == torch.float16 else x
    for bits in (2, 4, 8):
        assert torch.isfinite(quantizer_class(bits, 32, "token").quantize(x).dequantize()).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_errors_that_name_the_place(bad):
    x = torch.zeros(1, 2, 64, 32)
    x[0, 1, 37, 5] = x[0, 1, 37, 6] = x[0, 1, 60, 0] = bad  # the first of them
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        AffineQuantizer(4, 32, "channel").quantize(x)


def test_groups_that_do_not_divide_and_widths_nobody_stores_are_refused():
    with pytest.raises(ConfigError, match="group_size=32: does not divide the 48 tokens"):
        AffineQuantizer(4, 32, "channel").quantize(torch.zeros(1, 1, 48, 64))
    with pytest.raises(ConfigError, match="does not divide the 48 channels"):
        AffineQuantizer(4, 32, "token").quantize(torch.zeros(1, 1, 64, 48))
    with pytest.raises(ConfigError, match="bits=7"):
        AffineQuantizer(7, 32)
    for size, typed in ((0, "0"), (-32, "-32"), (True, "true")):
        with pytest.raises(ConfigError, match=f"group_size={typed}: must be a positive integer"):
            AffineQuantizer(4, size, "channel")
    with pytest.raises(ConfigError, match="axis"):
        AffineQuantizer(4, 32, "row")


def test_rounding_is_half_to_even_and_clamped_before():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0, 3.0, 3.0, 3.0]).view(1, 1, 8, 1)
    assert AffineQuantizer(2, 8).quantize(x).codes().flatten().tolist() == [0, 0, 2, 2, 3, 3, 3, 3]


def test_a_minimum_past_the_range_of_fp16_is_stored_as_far_as_it_goes_and_the_scale_is_made_from_it():
    x = torch.tensor([-70144.0, 0.0, -1024.0, 512.0]).bfloat16().view(1, 1, 4, 1)
    result = AffineQuantizer(4, 4, "channel").quantize(x)
    assert result.minimum.item() == -65504.0
    assert result.scale.item() == torch.tensor((512.0 + 65504.0) / 15).half().item()


def test_the_scale_of_a_group_whose_range_passes_fp16_is_its_whole_range():
    """The difference of the extremes is infinite in fp16; a fifteenth of it is not."""
    x = torch.tensor([-60000.0, 60000.0, 0.0, 30000.0]).half().view(1, 1, 4, 1)
    result = AffineQuantizer(4, 4, "channel").quantize(x)
    assert result.scale.item() == 8000.0 and result.minimum.item() == -60000.0
    assert result.codes().flatten().tolist() == [0, 15, 8, 11]
    assert result.dequantize().flatten().tolist() == [-60000.0, 60000.0, 4000.0, 28000.0]


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_bf16_is_decoded_in_fp32_and_rounded_once(axis):
    x = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)) + 3).bfloat16()
    quantizer = AffineQuantizer(4, 32, axis)
    result = quantizer.quantize(x)
    scale, minimum = (p.float().repeat_interleave(32, -2 if axis == "channel" else -1) for p in result.params)
    assert torch.equal(result.dequantize(), (result.codes().float() * scale + minimum).bfloat16())


@pytest.mark.parametrize("quantizer_class", [AffineQuantizer, AtomQuantizer])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_negative_zero_is_stored_as_zero(quantizer_class, dtype):
    """The device decides which of the two zeros is an extreme."""
    for group in ([-0.0, -0.0], [-0.0, 0.0], [0.0, 0.0]):
        result = quantizer_class(4, 2, "token").quantize(torch.tensor(group).to(dtype).view(1, 1, 1, 2))
        assert not any(bool(param.signbit().any()) for param in result.params)
    result = quantizer_class(4, 2, "token").quantize(torch.tensor([-0.0, 3.0]).to(dtype).view(1, 1, 1, 2))
    assert not any(bool(param.signbit().any()) for param in result.params)


def test_a_group_beyond_the_range_of_fp16_has_no_negative_scale():
    x = torch.tensor([-70144.0, -80000.0]).bfloat16().view(1, 1, 2, 1)
    result = AffineQuantizer(4, 2, "channel").quantize(x)
    assert (result.scale.item(), result.minimum.item()) == (0.0, -65504.0)
    assert result.codes().flatten().tolist() == [0, 0]
    wide = torch.tensor([0.0, 3e38]).bfloat16().view(1, 1, 2, 1)
    result = AffineQuantizer(4, 2, "channel").quantize(wide)
    assert result.scale.item() == 65504.0 and result.codes().flatten().tolist() == [0, 15]


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-5 / 15), (torch.float16, 6.556510925292969e-07)])
def test_atoms_scale_has_a_least_value(dtype, least):
    """1e-5 over the number of levels, each rounded to the dtype."""
    result = AtomQuantizer(4, 2, "token").quantize(torch.zeros(1, 1, 1, 2, dtype=dtype))
    assert result.scale.item() == pytest.approx(least, rel=1e-6) and result.codes().tolist() == [[[[0, 0]]]]
    assert result.dequantize().tolist() == [[[[0.0, 0.0]]]]


def test_atoms_scale_of_a_range_beyond_fp16_is_computed_in_fp32_and_stored_as_far_as_it_goes():
    x = torch.tensor([-60000.0, 60000.0]).half().view(1, 1, 1, 2)
    result = AtomQuantizer(4, 2, "token").quantize(x)
    assert result.params[0].item() == 8000.0 and result.params[1].item() == 8.0
    assert result.codes().flatten().tolist() == [0, 15] and result.minimum.item() == -64000.0
    assert result.dequantize().flatten().tolist() == [-64000.0, 56000.0]
    result = AtomQuantizer(2, 2, "token").quantize(torch.tensor([-3e38, 3e38]).bfloat16().view(1, 1, 1, 2))
    assert result.scale.item() == 65504.0 and result.scale.dtype == torch.float16
    low = AtomQuantizer(4, 2, "token").quantize(torch.tensor([-65504.0, 60000.0]).half().view(1, 1, 1, 2))
    assert torch.isfinite(low.dequantize()).all()


def test_atom_decodes_bf16_in_fp32():
    x = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    result = AtomQuantizer(4, 32, "token").quantize(x)
    scale, zero = (p.float().repeat_interleave(32, -1) for p in result.params)
    assert torch.equal(result.dequantize(), ((result.codes().float() - zero) * scale).bfloat16())
    assert {p.dtype for p in result.params} == {torch.float16}


def test_decoded_values_that_pass_fp16_end_at_its_largest_number():
    quantizer, code = AffineQuantizer(4, 2, "token"), torch.tensor([[15, 0]], dtype=torch.uint8)
    params = torch.tensor([[5000.0]]).half(), torch.tensor([[1000.0]]).half()
    assert quantizer.decode(code, params, torch.float16).tolist() == [[65504.0, 1000.0]]
    assert quantizer.decode(code, params, torch.float32).tolist() == [[76000.0, 1000.0]]
    atom = AtomQuantizer(4, 2, "token")
    assert atom.decode(code, (params[0], torch.tensor([[0.0]])), torch.float16).tolist() == [[65504.0, 0.0]]
    assert atom.decode(code, (params[0], torch.tensor([[15.0]])), torch.float16).tolist() == [[0.0, -65504.0]]


def test_shapes_of_groups_and_parameters():
    by_channel, by_token = AffineQuantizer(4, 16), AffineQuantizer(4, 8, "token")
    whole = AffineQuantizer(4, None, "token")
    shapes = [[p.shape(48, 24) for p in q.parameters(torch.float16)] for q in (by_channel, by_token, whole)]
    assert shapes == [[(3, 24)] * 2, [(48, 3)] * 2, [(48, 1)] * 2]
    assert [q.block_tokens for q in (by_channel, by_token, whole)] == [16, 1, 1]
    assert {p.dtype for q in (by_channel, by_token) for p in q.parameters(torch.bfloat16)} == {torch.float16}
    assert {p.dtype for q in (by_channel, by_token) for p in q.parameters(torch.float32)} == {torch.float32}
    x = torch.arange(2 * 48 * 24.0).view(2, 1, 48, 24)
    assert torch.equal(by_channel.group(x)[1, 0, 2, 5], x[1, 0, 37]) and by_channel.group(x).shape == (2, 1, 3, 16, 24)
    assert torch.equal(by_token.group(x)[1, 0, 7, 2], x[1, 0, 7, 16:]) and whole.group(x).shape == (2, 1, 48, 1, 24)
    strided = x.transpose(-1, -2)
    assert torch.equal(AffineQuantizer(4, 8).group(strided)[0, 0, 1, 3], strided[0, 0, 11])
    assert by_channel.expand(torch.zeros(2, 3)).shape == (2, 1, 3)
    assert by_token.expand(torch.zeros(2, 3)).shape == (2, 3, 1)
    for quantizer, shape in ((by_channel, (2, 1, 3, 24)), (by_token, (2, 1, 48, 3)), (whole, (2, 1, 48, 1))):
        assert {part.shape for part in quantizer.encode(x)[1]} == {shape}
    assert repr(by_token) == "AffineQuantizer(bits=4, group_size=8, axis='token')"
    assert repr(AtomQuantizer(2, None, "token")) == "AtomQuantizer(bits=2, group_size=None, axis='token')"


def test_parameters_of_wide_dtypes_are_stored_in_fp32():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [param_dtype(dtype) for dtype in dtypes] == [torch.float16] * 2 + [torch.float32] * 2


def test_the_package_names_its_quantizers_and_nothing_else():
    assert kvbench.quantizers.AtomQuantizer is AtomQuantizer and kvbench.quantizers.Quantized is Quantized
    assert kvbench.quantizers.HierarchicalQuantizer.__name__ == "HierarchicalQuantizer"
    with pytest.raises(AttributeError, match=r"'kvbench\.quantizers' has no attribute 'Nothing'"):
        _ = kvbench.quantizers.Nothing


def test_divisors_are_tensors_in_the_dtype_of_the_arithmetic():
    """A device divides by a tensor exactly, by a number not."""
    for dtype, wanted in (
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ):
        number = AffineQuantizer.whole(15, torch.zeros(3, dtype=dtype))
        assert (number.dtype, number.shape, number.item()) == (wanted, (), 15.0)
