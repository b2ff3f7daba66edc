"""The sketch of the residual: codes and values restated, random matrices, and what is stored."""

import math

import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers.qjl import SketchQuantizer, gaussian, orthogonal
from kvbench.quantizers.turboquant import level_table, nearest_levels

D = 64


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
