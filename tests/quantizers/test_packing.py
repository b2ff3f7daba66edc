"""Packed bytes hold every code and nothing else."""

import pytest
import torch

from kvbench.quantizers.packing import PLANES, join_planes, pack, split_planes, unpack


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (128, 64)])
def test_pack_and_unpack_are_inverse(bits, shape):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits, codes.shape), codes)
    assert sum(p.numel() for p in packed) == sum(-(-codes.numel() * width // 8) for width in PLANES[bits])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_first_plane_holds_the_upper_bits(bits):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    planes = split_planes(codes, bits)
    below = bits - PLANES[bits][0]
    assert torch.equal(planes[0], codes >> below)
    assert torch.equal(join_planes(planes, bits), codes)
