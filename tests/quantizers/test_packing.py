"""Packed bytes hold every code and nothing else."""

import pytest
import torch

from kvbench.quantizers.packing import PLANES, join_planes, pack, split_planes, unpack


@pytest.mark.parametrize("bits", list(PLANES))
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (128, 64)])
def test_pack_and_unpack_are_inverse(bits, shape):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits, codes.shape), codes)
    assert sum(p.numel() for p in packed) == sum(-(-codes.numel() * width // 8) for width in PLANES[bits])


@pytest.mark.parametrize("bits", list(PLANES))
def test_the_first_plane_holds_the_upper_bits(bits):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    planes = split_planes(codes, bits)
    below = bits - PLANES[bits][0]
    assert torch.equal(planes[0], codes >> below)
    assert torch.equal(join_planes(planes, bits), codes)


def test_earlier_codes_are_in_the_lower_bits_of_a_byte():
    def packed(codes: list[int], bits: int) -> list[list[int]]:
        return [plane.tolist() for plane in pack(torch.tensor(codes, dtype=torch.uint8), bits)]

    assert packed([1, 2, 3, 0, 2], 2) == [[0b00111001, 0b10]]
    assert packed([0x1, 0x2, 0xF], 4) == [[0x21, 0x0F]]
    assert packed([0xA1, 0xB2], 8) == [[0xBA], [0x21]]
    assert packed([0b101, 0b011, 0b110], 3) == [[0b110110], [0b011]]
    assert packed([0b10101, 0b01110], 5) == [[0b01111010], [0b01]]
    assert packed([0b101011, 0b011100], 6) == [[0b01111010], [0b0011]]
    assert {plane.dtype for plane in pack(torch.zeros(3, dtype=torch.uint8), 3)} == {torch.uint8}


def test_planes_of_any_integer_dtype_are_joined():
    codes = torch.arange(256, dtype=torch.int16)
    assert torch.equal(join_planes([codes >> 4, codes & 15], 8), codes)
    assert torch.equal(join_planes([torch.tensor([3, 1]), torch.tensor([0, 1])], 3), torch.tensor([6, 3]))
