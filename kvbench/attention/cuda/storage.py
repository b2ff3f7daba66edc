"""Storage formats in the CUDA decode kernel: bytes per slot, groups per tile, columns per query row, integer products.

TurboQuant's levels are looked up in constants of the program, as bytes of fp16 numbers or as integers.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from kvbench.attention.phases import Format
from kvbench.attention.work import FACTORED, TABLES

#: formats of a layer: for each phase (:class:`kvbench.attention.work.Work`), that of its keys and that of its values
Signature = tuple[tuple[Format, Format], ...]


#: kinds of keys whose codes stand for levels, with the norm of the token as their only parameter
LEVELS = ("levels", "levels_read")


def pitch(channels: int) -> int:
    """Return the distance of two rows of keys in a slot of the ring buffer, in bytes.

    Args:
        channels: number of channels of a head. Unless it is a multiple of 64, 16 bytes follow each row, so that the
            rows that a matrix instruction reads at once lie in different banks.
    """
    return 2 * channels + (16 if channels % 64 else 0)


def slot_bytes(form: Format, channels: int, key: bool = False, tile: int = 128) -> int:
    """Return the bytes of codes and parameters of one tile of 128 tokens in a slot; 0 in full precision.

    Args:
        tile: number of tokens that share the cross factors of their values (kind ``cross``).
    """
    if form.kind == "full":
        return 0
    if form.window:
        return 8 * form.bits * pitch(channels) + 2 * groups_met(form) * (channels * 2 + 16)
    per_token = form.axis == "token"
    factors = 128 * (channels // form.group + form.padding) if per_token else 128 // form.group * channels
    params = factors * form.group_bytes
    cross = 0 if form.kind != "cross" else 256 if key else 128 // tile * channels * 2
    return 8 * form.bits * (pitch(channels) if key else 2 * channels) + params + cross


def tabulated(form: Format, channels: int, key: bool = False) -> int:
    """Return the bytes of the table into which a warp converts the factors of a tile before it multiplies by them.

    Args:
        key: True for keys, whose factors become fp32 if a token has several; False for values, whose factors become
            fp16, followed by zero points of 16 bits if the kind is ``folded``.
    """
    if form.kind not in FACTORED or not form.scale:
        return 0
    groups = channels // form.group
    if key:
        return 128 * groups * 4 if groups > 1 else 0
    return 128 * (groups + (form.kind == "folded")) * 2


@lru_cache(maxsize=256)
def groups_met(form: Format) -> int:
    """Return how many groups may share a tile, rounded up to a power of two, in a format whose groups cross tiles."""
    count = -(-form.window // form.group)
    least, longer = divmod(form.window, count)
    ends = list(accumulate(least + (number < longer) for number in range(count)))

    def group(token: int) -> int:
        window, inside = divmod(token, form.window)
        return window * count + bisect_right(ends, inside)

    # tiles begin at other tokens of a window until as many tiles have passed as a window has tokens
    most = max(group(128 * tile + 127) - group(128 * tile) + 1 for tile in range(form.window))
    return 1 << (most - 1).bit_length()


def columns_of_row(phases: Signature) -> int:
    """Return how many columns of the matrix products a query row takes: one, or one for each group in a tile."""
    return max((groups_met(key) for key, _ in phases if key.window), default=1)


def integer_rows(phases: Signature, channels: int, rows: int, softcap: bool, bf16: bool) -> int:
    """Return the largest number of query rows for which the kernel multiplies codes as integers: 0, 1 or 4.

    It does so for codes of 2 bits in the phases for which :func:`integers` is True, with one query row and without a
    softcap; and for levels of 3 bits (:func:`level_bytes`) with up to four query rows in bf16. Queries in fp16 are left
    out, because bytes round levels more coarsely than fp16 does.

    Integers would also be possible for windows whose groups cross tile borders (``cuda/integer.cuh``), but slower than
    fp16: a field then has tokens of two groups and needs two products of integers. With LogQuant's W = 42 and 8
    sequences of 32k tokens, a layer takes 201 microseconds on an H200 in fp16, and 210 with integers.
    """
    if rows > 4 or any(key.window for key, _ in phases):
        return 0
    levels = bf16 and any(level_bytes(key) for key, _ in phases)
    codes = any(integers(key, value, channels) for key, value in phases)
    if rows == 1:
        return int((codes or levels) and not (codes and softcap))
    return 4 if levels else 0


def level_bytes(key: Format) -> bool:
    """Return True if the levels of keys can be multiplied as integers of a byte (``cuda/byte_levels.cuh``)."""
    return key.kind in LEVELS and key.bits == 3


def has_columns(key: Format, value: Format, channels: int) -> bool:
    """Return True if, for one query row, each group of codes can have its own column (``cuda/columns.cuh``)."""
    return channels in (64, 128) and all(
        (form.kind, form.bits, form.group, form.scale) == ("float", 4, 16, "e4m3") for form in (key, value)
    )


def integers(key: Format, value: Format, channels: int) -> bool:
    """Return True if codes of these formats can be multiplied as integers (``cuda/integer.cuh``) by one query row."""
    return (
        channels in (64, 128)
        and all((form.kind, form.bits) == ("affine", 2) for form in (key, value))
        and key.axis == "channel"
        and key.group >= 32
        and channels // value.group <= 4
    )


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

    With 4 bits, the entries are the magnitudes of the levels. With 3 bits they are all levels: first those of the even
    codes, then those of the odd ones.

    Rounding a level to fp16 gives every token with that code the same error. To reduce it, :data:`FACTORS` factors are
    tried, and all levels are multiplied by the factor for which the largest relative error is least.
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


def order_of_3_bits() -> list[int]:
    """Return the codes of 3 bits in the order of table entries: the kernel joins their last bit above the others."""
    return [*range(0, 8, 2), *range(1, 8, 2)]


def table_words(kind: str, bits: int) -> tuple[int, ...]:
    """Return the levels of a table (:data:`TABLES`) plus 128, as ``cuda/tables.cuh`` looks them up.

    The result is four 32-bit numbers with four bytes each, of which 3-bit codes use two.
    """
    levels = TABLES[kind, bits]
    order = order_of_3_bits() if bits == 3 else range(len(levels))
    return words_of_bytes([levels[code] + 128 for code in order] + [0] * (16 - len(levels)))


def words_of_bytes(entries: list[int]) -> tuple[int, ...]:
    """Return bytes as 32-bit numbers, the first of four bytes lowest."""
    return tuple(int.from_bytes(bytes(entries[i : i + 4]), "little") for i in range(0, len(entries), 4))


class ByteTable(NamedTuple):
    """The levels of 3-bit codes as integers of a byte, for ``cuda/byte_levels.cuh``.

    Args:
        words: eight entries, four per 32-bit number: levels as multiples of `unit` plus 127.5, then their squares.
        unit: a level is ``unit * (entry - 127.5)``.
        read_unit: a normalised level is ``read_unit * (entry - 127.5) / s``, where s is the square root of the sum of
            the table's squares over the levels of its token.
    """

    words: tuple[int, ...]
    unit: float
    read_unit: float


#: stands for the table of bytes where a kernel reads no levels of 3 bits
NO_BYTES = ByteTable((0,) * 4, 0.0, 0.0)


@cache
def byte_table(channels: int) -> ByteTable:
    """Return the table of bytes of the levels of 3-bit codes, in the order of :func:`codebook_levels`.

    Levels come in pairs of opposite sign, so they are rounded to odd multiples of half a step, with the step that
    gives the least mean squared error. This error is 7e-4 of the levels' root mean square, because one step suits all
    of the only four magnitudes. Squares are multiplied by a factor and rounded to integers up to 255; the factor is the
    one with the least error of a token's sum.
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
    """Return factor `number` of the :data:`FACTORS` factors, which are evenly spaced from 1 to 2."""
    return 1 + number / FACTORS
