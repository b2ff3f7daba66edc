"""UltraQuant and Octave: bit-equal to vLLM's reference code."""

import math

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.quantizers.engine.amd import Octave, UltraQuant, octave, slot_bytes
from tests.quantizers.engine.golden import DEQUANTIZED, array, same


def test_rotated_keys_of_ultraquant_equal_the_engine():
    same(UltraQuant(), array("amd/uqK_rot"), "amd/uqK", ["scale_byte"], "_deq_basis_of_codes")


def test_values_of_ultraquant_equal_the_engine():
    same(UltraQuant(), array("x"), "amd/uqV", ["scale_byte"], "_deq_basis_of_codes")


def signs(count):
    rng = torch.Generator().manual_seed(0x5E17)
    return (torch.randint(0, 2, (count,), generator=rng) * -2 + 1).float()


def butterfly(x, block):
    """The engine's transform of blocks, orthonormal, in its order of additions."""
    shape, half = x.shape, 1
    x = x.reshape(-1, shape[-1] // block, block)
    while half < block:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return (x / math.sqrt(block)).view(shape)


def nibbles(codes):
    """4-bit codes as the engine's bytes: of 8 channels, j and j + 4 share byte j."""
    low, high = codes.int().unflatten(-1, (-1, 2, 4)).unbind(-2)
    return (low | high << 4).flatten(-2).to(torch.uint8)


def test_slots_of_octave_equal_the_engine():
    keys = butterfly(array("x") * signs(64), 64)
    key, value = octave("octave_k3v4", 64, 64)
    codes, (scale,) = key.encode(keys)
    slots = array("amd/octave_k3v4_rope64_slots")
    assert torch.equal(nibbles(codes), slots[..., :32])
    assert torch.equal(scale.contiguous().view(torch.uint8), slots[..., 64:66])
    values = butterfly(key.decode(codes, (scale,), torch.float32), 64) * signs(64)
    assert torch.allclose(values[:, :DEQUANTIZED], array("amd/octave_k3v4_rope64_K_deq"), rtol=1e-6, atol=1e-5)
    # the slots of the last tokens hold the values of the first ones, which are stored in their order
    slots = array("amd/octave_k3v4_rope64_value_slots")
    codes, (scale,) = value.encode(butterfly(array("x") * signs(64), 64))
    assert torch.equal(nibbles(codes), slots[..., 32:64])
    assert torch.equal(scale[..., :1].contiguous().view(torch.uint8), slots[..., 66:68])
    assert slots.shape[-1] == 72 and value.parameters(torch.float16)[0].shape(1, 64) == (1, 3)


@pytest.mark.parametrize(("rope", "bits"), [(128, 4), (64, 4), (0, 3)])
def test_channels_with_rope_have_four_bits_and_others_three(rope, bits):
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    key, _ = octave("octave_k3v3", 128, rope)
    assert key.bits == bits
    codes, params = key.encode(x)
    assert params[0].shape == (6, 2) and codes[:, rope:].numel() == (codes[:, rope:] < 8).sum()
    values = key.decode(codes, params, torch.float32)
    for part in (slice(0, 64), slice(64, 128)):
        wide = 4 if part.start < rope else 3
        alone, scale = Octave(wide, 64).encode(x[:, part])
        assert torch.equal(codes[:, part], alone)
        assert torch.equal(values[:, part], Octave(wide, 64).decode(alone, scale, torch.float32))


def test_scales_keep_the_product_with_the_token():
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    quantizer = Octave(3, None)
    values = quantizer.decode(*quantizer.encode(x), torch.float32)
    assert torch.allclose((x * values).sum(-1), x.square().sum(-1), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "head", "rope", "nbytes"),
    [
        ("octave_k3v4", 128, 128, 136),
        ("octave_k3v4", 64, 64, 72),
        ("octave_k3v3", 128, 64, 112),
        ("octave_k3v3_compact", 128, 64, 100),
    ],
)
def test_slots_are_padded_with_the_values(name, head, rope, nbytes):
    key, value = octave(name, head, rope)
    assert key.padding == 0 and slot_bytes(head, rope, value.bits, "compact" in name) + 2 * value.padding == nbytes


@pytest.mark.parametrize(("name", "head", "rope"), [("octave_k3v4", 96, 96), ("octave_k3v3_compact", 192, 64)])
def test_head_sizes_that_do_not_fit_are_refused(name, head, rope):
    with pytest.raises(ConfigError, match=f"not {head}"):
        octave(name, head, rope)


@pytest.mark.parametrize(
    ("name", "head", "nbytes"), [("octave_k3v4", 64, 72), ("octave_k3v3", 64, 64), ("octave_k3v3_compact", 64, 52)]
)
def test_the_parameters_of_a_value_hold_its_scale_and_the_padding(name, head, nbytes):
    """What is stored of a token: 4 bits a channel, in compact slots 3, and parameters of 2 bytes."""
    key, value = octave(name, head, head)
    packed = sum(
        head * (3 if "compact" in name or (side is value and side.bits == 3) else 4) // 8 for side in (key, value)
    )
    stored = [side.parameters(torch.float16)[0].shape(1, head)[-1] for side in (key, value)]
    assert packed + 2 * sum(stored) == nbytes
