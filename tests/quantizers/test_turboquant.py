"""TurboQuant's quantizers against vLLM's outputs (tests/golden/new/turboquant.npz).

The sketch of the residual: codes and values restated, random matrices, and what is stored.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers.packing import pack
from kvbench.quantizers.turboquant import (
    LevelQuantizer,
    SketchQuantizer,
    TruncatingQuantizer,
    gaussian,
    level_table,
    levels,
    midpoints,
    nearest_levels,
    orthogonal,
    stored_codes,
)

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


def keys(tokens: int = 40) -> torch.Tensor:
    return torch.randn(2, tokens, D, generator=torch.Generator().manual_seed(7)) * 3


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_are_a_level_and_the_sign_of_the_rest(bits):
    x, quantizer = keys(), SketchQuantizer(bits)
    codes, (norm, length) = quantizer.encode(x)
    size = x.norm(dim=-1, keepdim=True)
    y = x / (size + 1e-8)
    nearest = nearest_levels(y, bits - 1)
    table = level_table(D, bits - 1, "cpu")
    rest = y - table[nearest.long()]
    projected = rest @ gaussian(D, 0, "cpu").T
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and int(codes.max()) == 2**bits - 1
    assert torch.equal(codes >> 1, nearest)
    clear = projected.abs() > 1e-5
    assert torch.equal((codes & 1)[clear].bool(), (projected < 0)[clear])
    assert norm.dtype == length.dtype == torch.float16 and norm.shape == length.shape == (2, 40, 1)
    assert torch.allclose(norm.float(), size, rtol=1e-3)
    assert torch.allclose(length.float(), rest.norm(dim=-1, keepdim=True), rtol=1e-3)
    # the decoded key, as the paper states it
    signs = 1 - 2 * (codes & 1).float()
    sketch = math.sqrt(math.pi / 2) / D * length.float() * (signs @ gaussian(D, 0, "cpu"))
    wanted = norm.float() * (table[nearest.long()] + sketch)
    assert torch.allclose(quantizer.decode(codes, (norm, length), torch.float32), wanted, rtol=1e-4, atol=1e-5)
    halved = quantizer.decode(codes, (norm, length), torch.bfloat16)
    assert halved.dtype == torch.bfloat16 and torch.allclose(halved.float(), wanted, rtol=1e-2, atol=1e-2)


def test_the_sign_of_nothing_is_positive():
    """A key that equals its levels leaves no rest, and its projections are 0."""
    quantizer = SketchQuantizer(2)
    y = level_table(D, 1, "cpu")[torch.arange(D) % 2][None]
    codes, length = quantizer.encode_unit(y)
    assert length.tolist() == [[0.0]] and bool((codes & 1 == 0).all())


def test_a_given_projection_replaces_the_random_one():
    given = torch.eye(D)
    codes, length = SketchQuantizer(3, given).encode_unit(keys()[0] / 30)
    rest = keys()[0] / 30 - level_table(D, 2, "cpu")[(codes >> 1).long()]
    assert torch.equal((codes & 1).bool(), rest < 0)
    assert SketchQuantizer(3, given, seed=5).projection(D, torch.device("cpu")) is given
    assert torch.equal(SketchQuantizer(3, seed=5).projection(D, torch.device("cpu")), gaussian(D, 5, "cpu"))
    assert length.shape == (40, 1)


def test_keys_that_are_not_finite_are_refused_and_large_norms_end_at_the_largest_number():
    x = keys()
    x[1, 2, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\(1, 2, 3\)"):
        SketchQuantizer(3).encode(x)
    _, (norm, _) = SketchQuantizer(3).encode(torch.full((1, D), 6e4))
    assert norm.tolist() == [[65504.0]]
    codes, params = SketchQuantizer(3).encode(torch.zeros(1, D))
    assert not SketchQuantizer(3).decode(codes, params, torch.float32).any()


def test_a_sketch_stores_two_numbers_for_a_token():
    quantizer = SketchQuantizer(3, seed=2)
    assert repr(quantizer) == "SketchQuantizer(bits=3, seed=2)" and quantizer.kind == "sketch"
    assert (quantizer.group_size, quantizer.axis, SketchQuantizer(3).seed) == (None, "token", 0)
    assert [(part.dtype, part.shape(10, D)) for part in quantizer.parameters(torch.float32)] == [
        (torch.float16, (10, 1))
    ] * 2


def test_random_matrices_are_normal_and_follow_from_the_seed():
    matrix = gaussian(128, 3, "cpu")
    assert matrix.shape == (128, 128) and matrix.dtype == torch.float32
    assert torch.equal(matrix, torch.randn(128, 128, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(matrix, gaussian(128, 4, "cpu"))
    with torch.inference_mode():
        assert not gaussian(8, 11, "cpu").is_inference() and not orthogonal(8, 11).is_inference()


def test_random_rotations_are_orthogonal_and_as_likely_as_any_other():
    """The factor R of a matrix of normal numbers, with the rotation as Q, has a positive diagonal."""
    turn = orthogonal(D, 1)
    assert turn.dtype == torch.float32 and torch.allclose(turn @ turn.T, torch.eye(D), atol=1e-5)
    triangle = turn.T @ gaussian(D, 1, "cpu")
    assert bool((triangle.diagonal() > 0).all()) and float(triangle.tril(-1).abs().max()) < 1e-4
