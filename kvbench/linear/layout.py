"""Layout of 4-bit weights in memory: each lane of a GPU's warp loads just what its matrix instructions take.

The matrix instruction ``mma.m16n8k16`` takes a block of 16 output channels by 16 input channels of the weights in
*fragments*: lane ``4 g + t`` of a warp holds 8 numbers, those of output channels g and g + 8 and of four input
channels. Any four input channels will do, if the inputs are taken in the same order. A *tile* is 16 output channels by
64 input channels: lane 4 g + t has 4 words of 8 codes, one word for each of 4 instructions, 16 bytes in all. Word
``2 h + j`` holds input channels ``32 h + 8 t + 4 j`` and the three that follow, so that the inputs for two words are 16
consecutive bytes. Bits ``4 n`` to ``4 n + 3`` of a word with ``n = 4 odd + 2 half + row`` hold the code of output
channel ``g + 8 row`` and of input channel ``32 h + 8 t + 4 j + 2 half + odd``: a mask then yields two codes in 16 bits
each.

Each group of an output channel has one word: its scale in the lower 16 bits; 128 plus its zero, as a bf16 number, in
the upper 16 bits. A lane reads the words of output channels g and g + 8. Output channels are padded to multiples of 16
and input channels to multiples of 64, with weights that are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: output channels and input channels of a tile
ROWS, COLUMNS = 16, 64
#: numbers of input channels that can share a scale
GROUPS = (128, 64, 32)
#: bits of the bf16 number 128; the numbers 128 to 255 have these bits plus their distance to 128
BIAS = 0x4300


def fragments(codes: Tensor) -> Tensor:
    """Arrange codes as the kernel reads them.

    Args:
        codes: codes 0 to 15, uint8 ``[N, K]``; N must be a multiple of 16, and K a multiple of 64.

    Returns:
        int32 ``[N / 16, K / 64, 32, 4]``: tiles of output channels, tiles of input channels, lanes, words.
    """
    rows, columns = codes.shape
    # tile, row, g, tile, h, t, j, half, odd
    split = codes.view(rows // ROWS, 2, 8, columns // COLUMNS, 2, 4, 2, 2, 2)
    nibbles = split.permute(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(-1, 4, 2)  # tile, tile, g, t, h, j, odd, half, row
    octets = nibbles[..., 0] | nibbles[..., 1] << 4
    return octets.contiguous().view(torch.int32).view(rows // ROWS, columns // COLUMNS, 32, 4)


def codes(words: Tensor) -> Tensor:
    """Return the codes, uint8 ``[N, K]``, of words that :func:`fragments` arranged."""
    tiles, steps = words.shape[:2]
    lanes = (
        words.contiguous().view(tiles, steps, 8, 4, 2, 2).permute(0, 2, 1, 4, 3, 5).contiguous()
    )  # tile, g, tile, h, t, j
    out = words.new_empty((tiles, 2, 8, steps, 2, 4, 2, 2, 2), dtype=torch.uint8)
    # out: tile, row, g, tile, h, t, j, half, odd; nibble 4 odd + 2 half + row
    for nibble in range(8):  # eight passes are faster on a CPU than one permutation of nibbles
        out[:, nibble % 2, ..., nibble // 2 % 2, nibble // 4] = (lanes >> (4 * nibble)) & 15
    return out.view(tiles * ROWS, steps * COLUMNS)


def group_words(scales: Tensor, zeros: Tensor) -> Tensor:
    """Arrange scales and zeros as the kernel reads them.

    Args:
        scales: scales, fp16 or bf16 ``[N, K / group]``; N must be a multiple of 16.
        zeros: zeros 0 to 16, of the same shape, any integer dtype.

    Returns:
        int32 ``[N / 16, K / group, 8, 2]``: tiles, groups, g from 0 to 7, and the output channels g and g + 8.
    """
    rows, groups = scales.shape
    halves = torch.stack([scales.view(torch.int16), zeros.to(torch.int16) + BIAS], -1)
    words = halves.contiguous().view(torch.int32).view(rows // ROWS, 2, 8, groups)
    return words.permute(0, 3, 2, 1).contiguous()


def scales_and_zeros(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales ``[N, K / group]`` in `dtype` and zeros (uint8) of words that :func:`group_words` arranged."""
    tiles, count = words.shape[:2]
    halves = words.permute(0, 3, 2, 1).reshape(tiles * ROWS, count, 1).contiguous().view(torch.int16)
    scales, zeros = halves.unbind(-1)
    return scales.contiguous().view(dtype), (zeros - BIAS).to(torch.uint8)
