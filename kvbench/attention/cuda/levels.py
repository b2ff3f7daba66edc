"""TurboQuant's levels as the CUDA decode kernel looks them up: bytes of fp16 numbers in constants of the program."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

#: number of factors that are tried for a codebook
FACTORS = 1 << 16


class Table(NamedTuple):
    """The levels of a codebook in the form in which ``cuda/levels.cuh`` looks them up.

    Args:
        words: bytes of eight entries, four per 32-bit number: the lower bytes of fp16 numbers, their upper bytes, and
            the squares as integers.
        unit: number by which entries are multiplied to get levels.
        read_unit: number by which an entry is multiplied, after it has been divided by the square root of the sum of
            its token's squares, to get a normalised level.
    """

    words: tuple[int, ...]
    unit: float
    read_unit: float


#: stands for the table of a codebook that a kernel does not read
NONE = Table((0,) * 6, 0.0, 0.0)


@cache
def table(channels: int, bits: int) -> Table:
    """Return the table of a codebook.

    With 4 bits, the entries are the magnitudes of the levels. With 3 bits they are all levels, in the order of a code
    whose lowest bit has become its highest.

    fp16 holds a level with an error that is the same for every token with that code. Levels are therefore multiplied by
    the factor, of :data:`FACTORS` ones, with which the largest relative error is least. The factor of the squares,
    which are rounded to integers up to 255, is that with the least error of a token's sum.

    Args:
        channels: number of channels of a head.
        bits: bits of a code: 3 or 4.
    """
    import torch

    from kvbench.quantizers.turboquant import levels, midpoints

    ascending = levels(channels, bits).double()
    order = torch.arange(8, 16) if bits == 4 else torch.arange(8).view(4, 2).T.reshape(-1)
    entries = ascending[order] / ascending[-1]
    factors = 1 + torch.arange(FACTORS, dtype=torch.float64) / FACTORS
    scaled = entries[None] * factors[:, None]
    best = int((scaled.half().double() / scaled - 1).abs().amax(1).argmin())
    patterns = [pattern & 0xFFFF for pattern in scaled[best].half().view(torch.int16).tolist()]

    # how often a level occurs, as a share of a token's channels
    borders = torch.cat([torch.tensor([-9.0]), midpoints(ascending) * channels**0.5, torch.tensor([9.0])])
    shares = torch.special.ndtr(borders.double()).diff()[order] * (2 if bits == 4 else 1)
    factors = 160 + 95 * torch.arange(FACTORS, dtype=torch.float64) / FACTORS
    exact = entries.square()[None] * factors[:, None]
    errors = exact.round() - exact
    bias = (errors * shares).sum(1) / (exact * shares).sum(1)
    spread = (errors.square() * shares).sum(1).sqrt() / (exact * shares).sum(1) / channels**0.5
    squared = int((bias.abs() + spread).argmin())
    squares = [int(x) for x in exact[squared].round().tolist()]

    streams = ([p & 255 for p in patterns], [p >> 8 for p in patterns], squares)
    words = tuple(sum(stream[first + i] << (8 * i) for i in range(4)) for stream in streams for first in (0, 4))
    unit = float(ascending[-1] / factors_of(best))
    return Table(words, unit, float(factors[squared] ** 0.5 / factors_of(best)))


def factors_of(number: int) -> float:
    """Return the factor with a number, from 1 to 2."""
    return 1 + number / FACTORS
