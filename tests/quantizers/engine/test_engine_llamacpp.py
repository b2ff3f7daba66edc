"""llama.cpp's block formats: every byte of a block equals that of its reference functions."""

import pytest
import torch

from kvbench.quantizers.engine.llamacpp import IQ4NL, Q8_0, Ranged, Signed
from tests.quantizers.engine.golden import DEQUANTIZED, array

FORMATS = {
    "q8_0": Q8_0(),
    "q8_0_cpu": Q8_0(even=True),
    "q5_1": Ranged(5),
    "q5_0": Signed(5),
    "q4_1": Ranged(4),
    "q4_0": Signed(4),
    "iq4_nl": IQ4NL(),
}


def blocks(name, codes, params):
    """The bytes of llama.cpp's blocks: scales, for 5 bits the fifth bits, then the codes."""
    codes = codes.unflatten(-1, (-1, 32)).int()
    parts = [param[..., None].contiguous().view(torch.uint8) for param in params]
    if name.startswith("q8_0"):
        return torch.cat([*parts, (codes - 128).to(torch.int8).view(torch.uint8)], -1)
    if name.startswith("q5"):
        fifth = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8)
        parts.append(fifth.sum(-1).to(torch.uint8))
    nibbles = codes & 15
    return torch.cat([*parts, (nibbles[..., :16] | nibbles[..., 16:] << 4).to(torch.uint8)], -1)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_equal_those_of_the_engine(name):
    quantizer, x = FORMATS[name], array("x")
    codes, params = quantizer.encode(x)
    stored, computed = array(f"llamacpp/{name}_blocks"), blocks(name, codes, params)
    if name == "iq4_nl":  # the engine leaves the codes of a block of zeros as they were in memory
        filled = (x.unflatten(-1, (-1, 32)) != 0).any(-1)
        assert torch.equal(computed[~filled][:, :2], stored[~filled][:, :2])
        computed, stored = computed[filled], stored[filled]
    assert torch.equal(computed, stored)
    if name != "q8_0_cpu":
        values = quantizer.decode(codes, params, torch.float32)
        assert torch.equal(values[:, :DEQUANTIZED], array(f"llamacpp/{name}_deq"))


def test_the_cpu_rounds_some_codes_of_q8_0_differently():
    x = array("x")
    (ours, params), (even, others) = Q8_0().encode(x), Q8_0(even=True).encode(x)
    assert 0 < int((ours != even).sum()) < 20 and int((ours.int() - even.int()).abs().max()) == 1
    assert torch.equal(params[0], others[0])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_and_huge_blocks_stay_finite(name):
    quantizer = FORMATS[name]
    x = torch.zeros(3, 32)
    x[1], x[2] = 1e-30, 1e7
    x[2, 3] = -1e7
    values = quantizer.decode(*quantizer.encode(x), torch.float32)
    assert torch.isfinite(values).all() and values[0].eq(0).all() and values[1].abs().max() < 1e-20


@pytest.mark.parametrize("bits", [4, 5])
def test_the_scale_of_zeros_has_the_sign_of_the_engines_whatever_the_sign_of_the_zeros(bits):
    """The engine divides 0 by a negative number of levels."""
    _, params = Signed(bits).encode(torch.stack([torch.zeros(32), -torch.zeros(32)]))
    assert params[0].flatten().view(torch.int16).tolist() == [-0x8000, -0x8000]


def test_the_element_of_the_largest_magnitude_is_exact():
    x = torch.tensor([3.0, -8.0, 8.0] + [0.5] * 29)[None]
    codes, params = Signed(4).encode(x)
    assert params[0].item() == 1.0 and codes[0, :3].tolist() == [11, 0, 15]
