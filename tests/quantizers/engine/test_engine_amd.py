"""UltraQuant and Octave: bit-equal to vLLM's reference code."""

import math

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.quantizers.engine.amd import LEVELS, Octave, UltraQuant, octave, slot_bytes
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


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_of_octave_ascend_and_have_both_signs(bits):
    levels = LEVELS[bits]
    assert len(levels) == 2**bits and list(levels) == sorted(levels) == [-level for level in reversed(levels)]


@pytest.mark.parametrize(("bits", "deviation"), [(3, 59.0), (4, 46.0)])
def test_codes_are_the_levels_nearest_to_the_normalised_channels(bits, deviation):
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(4)) * 5
    codes, (scale,) = Octave(bits, None).encode(x)
    place = x / x.square().mean(-1, keepdim=True).sqrt() * deviation
    levels = torch.tensor(LEVELS[bits], dtype=torch.float32)
    assert torch.equal(codes.long(), (place[..., None] - levels).abs().argmin(-1))
    wanted = 64 * x.square().sum(-1, keepdim=True) / (x * levels[codes.long()]).sum(-1, keepdim=True)
    assert torch.allclose(scale.float(), wanted, rtol=1e-3)


def test_a_block_smaller_than_any_number_of_interest_has_small_codes():
    """The deviation counts as at least 1e-12, so that half of it stands for 23 of 46, of which 18 is the nearest."""
    codes, (scale,) = Octave(4, None).encode(torch.stack([torch.full((64,), 5e-13), torch.zeros(64)]))
    assert codes[0].unique().tolist() == [LEVELS[4].index(18)] and scale[1].tolist() == [0.0]


def test_a_tie_between_levels_of_octave_takes_the_lower_one():
    assert Octave(4, None).encode(torch.zeros(1, 64))[0].unique().tolist() == [LEVELS[4].index(-6)]


def test_blocks_of_ultraquant_have_the_power_of_two_nearest_to_the_wanted_scale():
    sizes = torch.tensor([0.0, 1e-39, 1 / 0.156, 4 / 0.156, 1.4 / 0.156, 1.43 / 0.156, 3e38])
    codes, (scale,) = UltraQuant().encode(sizes[:, None].expand(-1, 32).contiguous())
    exponents = [round(math.log2(size * 0.156)) for size in sizes[2:].tolist()]
    assert exponents[:4] == [0, 2, 0, 1]
    assert scale[:, 0].tolist() == [0, 1, *(127 + exponent for exponent in exponents)]
    assert not codes[0].any() and codes[2:, 0].tolist() == [7, 7, 7, 6, 7]  # 9.17 over 2 is nearer to 4 than to 6


def test_ties_of_ultraquant_take_the_lower_number():
    """Its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; the sign is the fourth bit."""
    x = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0])
    codes, (scale,) = UltraQuant().encode(torch.cat([x, x])[None])
    assert scale.tolist() == [[127]]
    assert codes[0, :16].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 9, 10, 11, 12, 13, 14, 15, 15]


@pytest.mark.parametrize(("name", "bits"), [("octave_k3v4", 4), ("octave_k3v3", 3), ("octave_k3v3_compact", 3)])
def test_values_have_the_bits_of_the_name_and_one_block(name, bits):
    key, value = octave(name, 128, 64)
    assert (value.bits, value.group_size, value.wide) == (bits, None, None)
    assert (key.bits, key.group_size, key.wide) == ((3, None, None) if "compact" in name else (4, 64, 64))
    whole, none = octave("octave_k3v4", 128, 128)[0], octave("octave_k3v4", 128, 0)[0]
    assert (whole.bits, whole.group_size, whole.wide) == (4, 64, None)
    assert (none.bits, none.group_size, none.wide) == (3, 64, None)


def test_octave_asks_for_rope_over_whole_blocks():
    with pytest.raises(ConfigError, match="128 with 32"):
        octave("octave_k3v4", 128, 32)
    octave("octave_k3v4", 192, 64)
    octave("octave_k3v3_compact", 256, 256)


@pytest.mark.parametrize(
    ("head", "rope", "bits", "compact", "nbytes"),
    [
        (128, 128, 4, False, 64 + 64 + 2 * 3),
        (128, 64, 3, False, 32 + 24 + 48 + 2 * 3),
        (192, 0, 3, False, 72 + 72 + 2 * 4),
        (128, 64, 3, True, 48 + 48 + 2 * 2),
    ],
)
def test_a_slot_holds_codes_of_both_sides_and_their_scales(head, rope, bits, compact, nbytes):
    assert slot_bytes(head, rope, bits, compact) == nbytes
