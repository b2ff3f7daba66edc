"""TurboQuant's quantizers against vLLM's outputs (tests/golden/new/turboquant.npz)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers.packing import pack
from kvbench.quantizers.turboquant import LevelQuantizer, TruncatingQuantizer, levels, midpoints, stored_codes

GOLDEN = Path(__file__).parents[1] / "golden" / "new" / "turboquant.npz"
D = 64


def sylvester(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix in fp32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    with np.load(GOLDEN) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_vllms_bit_for_bit(bits: int, golden: dict[str, torch.Tensor]) -> None:
    assert torch.equal(levels(D, bits), golden[f"centroids_b{bits}_D{D}"])


def test_levels_of_128_channels() -> None:
    """The numbers of the paper's rule as vLLM computes it, in fp32."""
    three = [0.0216536951, 0.0667902575, 0.118721462, 0.190065843]
    four = [0.0113515087, 0.034306858, 0.0580605306, 0.083301443, 0.111038531, 0.143001895, 0.182826623, 0.241381702]
    for bits, upper in ((3, three), (4, four)):
        computed = levels(128, bits)
        assert torch.equal(computed[len(upper) :], torch.tensor(upper))
        assert torch.equal(computed, -computed.flip(0))


def natural(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Stored codes as vLLM counts them, from the lowest level."""
    return stored_codes(bits).argsort()[codes.long()].to(torch.uint8)


@pytest.mark.parametrize("bits", [3, 4])
def test_keys_equal_vllms(bits: int, golden: dict[str, torch.Tensor]) -> None:
    assert torch.equal(midpoints(levels(D, bits)), golden[f"midpoints_b{bits}_D{D}"])
    quantizer, rotation = LevelQuantizer(bits), sylvester(D)
    codes, (norm,) = quantizer.encode(golden[f"k_D{D}"] @ rotation)
    assert torch.equal(norm[..., 0], golden[f"norm_half_D{D}"])
    assert (natural(codes, bits) != golden[f"kcodes_b{bits}_D{D}"]).float().mean() < 0.02  # ties at 0: see the README
    codes = quantizer.encode_unit(golden[f"y_D{D}"])
    assert torch.equal(natural(codes, bits), golden[f"kcodes_b{bits}_D{D}"])
    for correction, name in (("none", "khat"), ("read", "khat_nc")):
        reader = LevelQuantizer(bits, correction)  # type: ignore[arg-type]
        restored = reader.decode(codes, (norm,), torch.float32)[:, :32] @ rotation
        wanted = golden[f"{name}_b{bits}_D{D}"]
        assert bool(((restored - wanted).abs() <= 1e-5 * wanted.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize("bits", [3, 4])
def test_values_equal_vllms(bits: int, golden: dict[str, torch.Tensor]) -> None:
    quantizer = TruncatingQuantizer(bits)
    codes, (scale, minimum) = quantizer.encode(golden[f"v_D{D}"])
    assert torch.equal(codes, golden[f"vcodes_b{bits}_D{D}"])
    assert torch.equal(scale[..., 0], golden[f"vscale_b{bits}_D{D}"])
    assert torch.equal(minimum[..., 0], golden[f"vmin_b{bits}_D{D}"])
    restored = quantizer.decode(codes, (scale, minimum), torch.float32)[:, :32]
    assert torch.equal(restored, golden[f"vhat_b{bits}_D{D}"])


def test_slots_hold_the_bytes_of_vllms(golden: dict[str, torch.Tensor]) -> None:
    """Codes, norm, codes, scale and minimum of a token, put together in vLLM's order, are its cache's bytes."""
    wanted = golden[f"slot_bytes_4bit_nc_D{D}"]
    heads, tokens, size = wanted.shape
    keys = LevelQuantizer(4).encode_unit(golden[f"y_D{D}"])[:, :tokens]
    codes, (scale, minimum) = TruncatingQuantizer(4).encode(golden[f"v_D{D}"][:, :tokens].contiguous())
    pieces = [
        pack(natural(keys, 4), 4)[0].view(heads, tokens, -1),
        golden[f"norm_half_D{D}"][:, :tokens, None].contiguous().view(torch.uint8),
        pack(codes, 4)[0].view(heads, tokens, -1),
        scale.contiguous().view(torch.uint8),
        minimum.contiguous().view(torch.uint8),
    ]
    assert torch.equal(torch.cat(pieces, -1), wanted)
    assert size == D // 2 + 2 + D // 2 + 4


@pytest.mark.parametrize(("bits", "error"), [(3, 0.1774), (4, 0.0933)])
def test_errors_of_keys_with_two_large_channels(bits: int, error: float) -> None:
    x = torch.randn(512, 2, 128, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 8
    x[..., 70] *= 5
    quantizer, rotated = LevelQuantizer(bits), x @ sylvester(128)
    codes, params = quantizer.encode(rotated)
    relative = (quantizer.decode(codes, params, torch.float32) - rotated).norm() / x.norm()
    assert round(float(relative), 4) == error


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_norm_correction_at_write_and_at_read_differ_in_one_rounding(bits: int) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 3
    restored = []
    for correction in ("write", "read"):
        quantizer = LevelQuantizer(bits, correction)  # type: ignore[arg-type]
        codes, params = quantizer.encode(x)
        restored.append(quantizer.decode(codes, params, torch.float32))
    assert torch.allclose(*restored, rtol=2**-10, atol=0)
    assert torch.allclose(restored[1].norm(dim=-1), x.norm(dim=-1), rtol=2**-10)


def test_codes_of_four_bits_are_a_sign_and_a_magnitude() -> None:
    table, codes = LevelQuantizer(4).table(128), torch.arange(16)
    assert torch.equal(table[codes ^ 8], -table[codes])
    assert bool((table[:8] > 0).all()) and bool((table[:8].diff() > 0).all())
    for bits in (2, 3):
        assert torch.equal(LevelQuantizer(bits).table(128), levels(128, bits))


def test_nan_is_refused() -> None:
    x = torch.ones(2, 3, 64)
    x[1, 2, 5] = float("nan")
    for quantizer in (LevelQuantizer(3), TruncatingQuantizer(3)):
        with pytest.raises(NonFiniteError, match=r"\(1, 2, 5\)"):
            quantizer.encode(x)


def test_a_token_of_zeros_stays_zero() -> None:
    for quantizer in (LevelQuantizer(4), TruncatingQuantizer(4)):
        codes, params = quantizer.encode(torch.zeros(1, 64))
        assert not quantizer.decode(codes, params, torch.float32).any()
