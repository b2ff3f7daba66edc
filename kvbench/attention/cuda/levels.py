"""TurboQuant's levels as the CUDA decode kernel looks them up: bytes of fp16 magnitudes in constants of the program."""

from __future__ import annotations

from functools import cache

#: number of factors that are tried for a codebook
FACTORS = 1 << 16


@cache
def magnitudes(channels: int, bits: int) -> tuple[tuple[int, int, int, int], float]:
    """Return the magnitudes of the levels in fp16, and what to multiply by to get levels.

    fp16 holds a level with an error that is the same for every token with that code. The magnitudes are therefore
    multiplied by the factor, of :data:`FACTORS` ones between 1 and 2, with which the largest relative error is least.

    Args:
        channels: number of channels of a head.
        bits: bits of a code: 3 or 4.

    Returns:
        Four 32-bit numbers (the lower bytes of magnitudes 0 to 3 and 4 to 7, then their upper bytes), and the inverse
        of the factor.
    """
    import torch

    from kvbench.quantizers.turboquant import levels

    positive = levels(channels, bits)[1 << (bits - 1) :].double() / levels(channels, bits)[-1].double()
    factors = 1 + torch.arange(FACTORS, dtype=torch.float64) / FACTORS
    scaled = positive[None] * factors[:, None]
    best = int((scaled.half().double() / scaled - 1).abs().amax(1).argmin())
    patterns = scaled[best].half().view(torch.int16).tolist()
    patterns += [0] * (8 - len(patterns))
    words = [
        sum((patterns[first + i] >> shift & 255) << (8 * i) for i in range(4)) for shift in (0, 8) for first in (0, 4)
    ]
    factor = float(factors[best]) / float(levels(channels, bits)[-1].double())
    return (words[0], words[1], words[2], words[3]), 1 / factor
