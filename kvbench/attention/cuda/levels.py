"""TurboQuant's levels as the CUDA decode kernel looks them up: bytes of fp16 numbers in constants of the program."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

#: number of factors that are tried for a codebook
FACTORS = 1 << 16


class Table(NamedTuple):
    """The levels of a codebook in the form in which ``cuda/levels.cuh`` looks them up.

    Args:
        words: bytes of eight entries, four per 32-bit number: the lower bytes of fp16 numbers, then their upper bytes.
        unit: number by which entries are multiplied to get levels.
    """

    words: tuple[int, ...]
    unit: float


#: stands for the table of a codebook that a kernel does not read
NONE = Table((0,) * 4, 0.0)


@cache
def table(channels: int, bits: int) -> Table:
    """Return the table of a codebook.

    With 4 bits, the entries are the magnitudes of the levels. With 3 bits they are all levels, in the order of a code
    whose lowest bit has become its highest.

    fp16 holds a level with an error that is the same for every token with that code. Levels are therefore multiplied by
    the factor, of :data:`FACTORS` ones, with which the largest relative error is least.

    Args:
        channels: number of channels of a head.
        bits: bits of a code: 3 or 4.
    """
    import torch

    from kvbench.quantizers.turboquant import levels

    ascending = levels(channels, bits).double()
    order = torch.arange(8, 16) if bits == 4 else torch.arange(8).view(4, 2).T.reshape(-1)
    entries = ascending[order] / ascending[-1]
    factors = 1 + torch.arange(FACTORS, dtype=torch.float64) / FACTORS
    scaled = entries[None] * factors[:, None]
    best = int((scaled.half().double() / scaled - 1).abs().amax(1).argmin())
    patterns = [pattern & 0xFFFF for pattern in scaled[best].half().view(torch.int16).tolist()]

    streams = ([p & 255 for p in patterns], [p >> 8 for p in patterns])
    words = tuple(sum(stream[first + i] << (8 * i) for i in range(4)) for stream in streams for first in (0, 4))
    return Table(words, float(ascending[-1] / factors_of(best)))


def factors_of(number: int) -> float:
    """Return the factor with a number, from 1 to 2."""
    return 1 + number / FACTORS
