"""Hadamard matrices over blocks of channels, and the signs with which engines randomize them.

Sources: vLLM 0.33.0, ``int4_per_token_head.py`` (signs of one block, repeated) and ``rocm_octave.py`` (signs of the
whole head); Apache-2.0. Only the rules and the seeds are theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: seed of the signs in vLLM's rotated int4 cache, and in its Octave cache
SEED, OCTAVE_SEED = 0x9E3779B9, 0x5E17


def sylvester(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix of a power of two, with elements 1 and -1, fp64 ``[size, size]``."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def blocks(size: int, channels: int) -> Tensor:
    """Return the matrix with a Hadamard matrix of `size` in each diagonal block, fp64 ``[channels, channels]``."""
    return torch.block_diag(*[sylvester(size)] * (channels // size))


def signs(size: int) -> Tensor:
    """Return the pseudo-random signs of vLLM's rotated int4 cache for a block, fp64 ``[size]``."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator).double() - 1


def octave_signs(channels: int) -> Tensor:
    """Return the pseudo-random signs of vLLM's Octave cache for a whole head, fp64 ``[channels]``."""
    generator = torch.Generator("cpu").manual_seed(OCTAVE_SEED)
    return (torch.randint(0, 2, (channels,), generator=generator) * -2 + 1).double()
