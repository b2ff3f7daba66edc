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
def codebook_levels(channels: int, bits: int) -> Table:
    """Return the table of a codebook with codes of 3 or 4 bits.

    With 4 bits, the entries are the magnitudes of the levels. With 3 bits they are all levels, in the order of a code
    whose lowest bit has become its highest.

    fp16 holds a level with an error that is the same for every token with that code. Levels are therefore multiplied by
    the factor, of :data:`FACTORS` ones, with which the largest relative error is least.
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


class ByteTable(NamedTuple):
    """The levels of 3 bits as integers of a byte, for ``cuda/byte_levels.cuh``.

    Args:
        words: eight entries, four per 32-bit number: levels as multiples of `unit` plus 127.5, then their squares.
        unit: number by which entries, less 127.5, are multiplied to get levels.
        read_unit: number by which they are multiplied, after they have been divided by the square root of the sum of
            their token's squares, to get normalised levels.
    """

    words: tuple[int, ...]
    unit: float
    read_unit: float


#: stands for the table of bytes where a kernel reads no levels of 3 bits
NO_BYTES = ByteTable((0,) * 4, 0.0, 0.0)


@cache
def byte_table(channels: int) -> ByteTable:
    """Return the table of bytes of the levels of 3 bits, in the order of :func:`codebook_levels`.

    Levels come in pairs of opposite sign, so they are rounded to odd multiples of half a step, with the step of which
    the mean squared error is least. It is 7e-4 of the levels' root mean square: there are four magnitudes only, and one
    step suits all of them. The factor of the squares, rounded to integers up to 255, is that with the least error of a
    token's sum.
    """
    import torch

    from kvbench.quantizers.turboquant import levels, midpoints

    ascending = levels(channels, 3).double()
    borders = torch.cat([torch.tensor([-9.0]), midpoints(ascending) * channels**0.5, torch.tensor([9.0])])
    # how often a level occurs, as a share of a token's channels
    shares = torch.special.ndtr(borders.double()).diff()
    relative = ascending / ascending[-1]
    steps = torch.arange(FACTORS, dtype=torch.float64) / FACTORS

    scaled = relative[None] * (64 + 63.5 * steps[:, None])
    rounded = scaled.floor() + 0.5
    units = (rounded * ascending * shares).sum(1) / (rounded.square() * shares).sum(1)
    best = int(((rounded * units[:, None] - ascending).square() * shares).sum(1).argmin())

    factors = 160 + 95 * steps
    exact = relative.square()[None] * factors[:, None]
    errors = exact.round() - exact
    bias = (errors * shares).sum(1) / (exact * shares).sum(1)
    spread = (errors.square() * shares).sum(1).sqrt() / (exact * shares).sum(1) / channels**0.5
    squared = int((bias.abs() + spread).argmin())

    order = torch.arange(8).view(4, 2).T.reshape(-1)
    streams = [(rounded[best] + 127.5)[order].tolist(), exact[squared].round()[order].tolist()]
    words = tuple(sum(int(x[first + i]) << (8 * i) for i in range(4)) for x in streams for first in (0, 4))
    unit = float(units[best])
    return ByteTable(words, unit, unit * float(factors[squared].sqrt() / ascending[-1]))


def factors_of(number: int) -> float:
    """Return the factor with a number, from 1 to 2."""
    return 1 + number / FACTORS
