"""Triton kernel that balances, quantizes and packs KVarN's tiles, one program per 128 tokens of one (row, KV head).

The arithmetic is that of :class:`kvbench.quantizers.kvarn.KvarnQuantizer` in fp32, in another order of summation; codes
differ by 1 in at most one element of ten thousand, and parameters in their last bit. In tiles with a token or a channel
of zeros, rounding decides which state of the balance is the best, here as in the authors' code.

A tile is ``[tokens, channels]``. Its *rows* are the direction in which elements share a scale, its *columns* the other
one, which is adapted first. ALONG is the axis along which the deviations of columns are computed: 1 for keys, whose
columns are tokens; 0 for values, whose columns are channels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

#: adding and subtracting it rounds a number below 2**22 to a whole one, ties to even
ROUND = tl.constexpr(12582912.0)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def deviations(x, AXIS: tl.constexpr):
    """Compute unbiased standard deviations of a block of two dimensions along an axis."""
    COUNT: tl.constexpr = x.shape[AXIS]
    mean = tl.expand_dims(tl.sum(x, AXIS) / COUNT, AXIS)
    away = x - mean
    return tl.sqrt(tl.sum(away * away, AXIS) / (COUNT - 1))


@triton.jit
def adapted(logs, deviation):
    """Multiply factors, given as natural logarithms, by standard deviations; clamp both as the quantizer does."""
    step = tl.log(tl.minimum(tl.maximum(deviation, 1e-3), 1e3))
    return tl.minimum(tl.maximum(logs + step, -0.3), 10.0)


@triton.jit
def deviation_ratio(deviation):
    """Return the largest deviation divided by the smallest one."""
    return tl.max(deviation, 0) / tl.maximum(tl.min(deviation, 0), 1e-8)


@triton.jit
def divided_tile(x, columns, rows, ALONG: tl.constexpr):
    """Divide a tile by the factors of its columns and its rows."""
    return x * tl.expand_dims(1.0 / columns, ALONG) * tl.expand_dims(1.0 / rows, 1 - ALONG)


@triton.jit
def balanced(x, iterations, ALONG: tl.constexpr):
    """Return the factors of columns and of rows that balance a tile (``balanced_factors`` of the quantizer)."""
    column, row = deviations(x, ALONG), deviations(x, 1 - ALONG)
    least = deviation_ratio(column) + deviation_ratio(row)
    log_columns, log_rows = tl.zeros_like(column), tl.zeros_like(row)
    best_columns, best_rows = tl.zeros_like(column), tl.zeros_like(row)
    for _ in range(iterations):
        log_columns = adapted(log_columns, column)
        row = deviations(divided_tile(x, tl.exp(log_columns), tl.exp(log_rows), ALONG), 1 - ALONG)
        earlier = log_rows
        log_rows = adapted(log_rows, row)
        row *= tl.exp(earlier - log_rows)  # dividing a row divides its deviation
        column = deviations(divided_tile(x, tl.exp(log_columns), tl.exp(log_rows), ALONG), ALONG)
        measure = deviation_ratio(column) + deviation_ratio(row)
        better = measure <= least
        least = tl.minimum(measure, least)
        best_columns = tl.where(better, log_columns, best_columns)
        best_rows = tl.where(better, log_rows, best_rows)
    return tl.exp(best_columns), tl.exp(best_rows)


@triton.jit
def put_plane(words, codes, base, first_field, WIDTH: tl.constexpr, VALUE: tl.constexpr):
    """Write one plane of the codes of a KVarN tile, which fills whole fields of the words of a tile of 128 tokens.

    Args:
        words: pointer to the plane's words.
        codes: int32 ``[tokens, channels]``, below ``2 ** WIDTH``.
        base: offset of the first word of the tile of 128 tokens.
        first_field: field of the first token: 0, or half of the fields for the second tile of 64 tokens.
        WIDTH: bits of a field.
        VALUE: True for the word order of values, ``[channels, rows]``; False for that of keys, ``[rows, channels]``.
    """
    TOKENS: tl.constexpr = codes.shape[0]
    CHANNELS: tl.constexpr = codes.shape[1]
    ROWS: tl.constexpr = 8 * WIDTH
    COUNT: tl.constexpr = TOKENS // ROWS
    shifts = (first_field + tl.arange(0, COUNT)) * WIDTH
    word = tl.sum(tl.reshape(codes, (COUNT, ROWS, CHANNELS)) << shifts[:, None, None], 0)
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    place = words + base + (channel * ROWS + row if VALUE else row * CHANNELS + channel)
    if TOKENS < 128:  # noqa: SIM102
        if first_field > 0:  # the lower fields hold the tile before
            earlier = tl.load(place).to(tl.int32) & ((1 << (first_field * WIDTH)) - 1)
            word = word | earlier
    tl.store(place, word.to(tl.int16))


@triton.jit
def pack_tile(
    x, upper_words, lower_words, scales, minima, cross, record, stride_token, first, start, row, head, first_row, heads,
    tiles, tag, iterations,
    BALANCE: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Balance, quantize and pack one KVarN tile. Other arguments are those of :func:`pack_balanced`.

    Args:
        x: pointer to the first token of the program's row and head.
        first: index, within the segment, of the tile's first token.
        start: index, within the segment, of the first token of `x`.
        row: row of the tokens that the program packs, counted from `first_row`.
    """
    ALONG: tl.constexpr = 0 if VALUE else 1
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    tile = tl.load(x + (first - start + token)[:, None].to(tl.int64) * stride_token + channel[None, :])
    tile = tile.to(tl.float32)

    strange = tl.where(tile - tile == 0.0, 0x7FFFFFFF, token[:, None] * CHANNELS + channel[None, :])
    strange = tl.min(tl.min(strange, 1), 0)
    if strange != 0x7FFFFFFF:  # noqa: SIM102
        if tl.atomic_cas(record, 0, 1) == 0:
            tl.store(record + 1, tag)
            tl.store(record + 2, first_row + row)
            tl.store(record + 3, head)
            tl.store(record + 4, first + strange // CHANNELS)
            tl.store(record + 5, strange % CHANNELS)

    if BALANCE == "kvarn":
        columns, rows = balanced(tile, iterations, ALONG)
    else:
        columns = tl.full((CHANNELS if VALUE else TOKENS,), 1.0, tl.float32)
        rows = tl.full((TOKENS if VALUE else CHANNELS,), 1.0, tl.float32)
        if BALANCE == "norm":
            size = tl.maximum(tl.sqrt(tl.sum(tile * tile, 1)), 1e-8)
            if VALUE:
                rows = size
            else:
                columns = size
    tile = tile / tl.expand_dims(columns, ALONG) / tl.expand_dims(rows, 1 - ALONG)

    LEVELS: tl.constexpr = (1 << BITS) - 1
    low, high = tl.min(tile, 1 - ALONG), tl.max(tile, 1 - ALONG)
    step = tl.maximum((high - low) / LEVELS, 1e-10)
    codes = (tile - tl.expand_dims(low, 1 - ALONG)) / tl.expand_dims(step, 1 - ALONG)
    codes = tl.minimum(tl.maximum((codes + ROUND) - ROUND, 0.0), LEVELS).to(tl.int32)

    cell = (first_row + row).to(tl.int64) * heads + head
    of_tokens = cell * tiles * 128 + first + token
    of_channels = (cell * tiles * (128 // TOKENS) + first // TOKENS) * CHANNELS + channel
    of_rows, of_columns = (of_tokens, of_channels) if VALUE else (of_channels, of_tokens)
    tl.store(scales + of_rows, tl.minimum(rows * step, FP16_MAX).to(tl.float16))
    tl.store(minima + of_rows, tl.minimum(tl.maximum(rows * low, -FP16_MAX), FP16_MAX).to(tl.float16))
    tl.store(cross + of_columns, tl.minimum(columns, FP16_MAX).to(tl.float16))

    WIDTH: tl.constexpr = 2 if BITS < 4 else 4
    REST: tl.constexpr = BITS - WIDTH  # bits of the second plane
    at = (cell * tiles + first // 128) * CHANNELS
    put_plane(upper_words, codes >> REST, at * (8 * WIDTH), first % 128 // (8 * WIDTH), WIDTH, VALUE)
    if REST > 0:
        put_plane(lower_words, codes & ((1 << REST) - 1), at * (8 * REST), first % 128 // (8 * REST), REST, VALUE)


# Not specialized: arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["start", "count", "first_row", "tiles", "tag"])
def pack_balanced(
    x, upper_words, lower_words, scales, minima, cross, record, stride_row, stride_head, stride_token,
    start, count, first_row, heads, tiles, tag, iterations,
    BALANCE: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Balance, quantize and pack tiles. Grid: (rows x H, tiles of 128 tokens with a token to write, at least 1).

    Strides are those of `x`, in elements; its channels are contiguous.

    Args:
        x: pointer to the tokens in full precision.
        upper_words: pointer to the words of the first plane of codes.
        lower_words: pointer to those of the second plane; that of the first if there is only one.
        scales: pointer to the scales A, fp16.
        minima: pointer to the minima Z, fp16.
        cross: pointer to the cross factors C, fp16.
        record: pointer to where the location of the first NaN or Inf is stored
            (:func:`kvbench.cache.kernels.pack_kernel.pack_tiles`).
        start: index, within the segment, of the first token to write.
        count: number of tokens to write, a multiple of TOKENS; 0 to write nothing.
        first_row: row of the batch, in the segment, to which row 0 of the tokens belongs.
        tiles: number of tiles of 128 tokens per head in the buffers of words.
        tag: number that identifies the segment in `record`.
        BALANCE: ``kvarn``, ``norm`` or ``none``.
        TOKENS: tokens of a KVarN tile, 64 or 128.
        VALUE: True for values, False for keys.
    """
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin = x + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    for part in range(128 // TOKENS):  # one after the other, as they share words
        first = (start // 128 + tl.program_id(1)) * 128 + part * TOKENS
        if (first >= start) & (first < start + count):
            pack_tile(
                begin, upper_words, lower_words, scales, minima, cross, record, stride_token, first, start, row, head,
                first_row, heads, tiles, tag, iterations, BALANCE, BITS, TOKENS, CHANNELS, VALUE,
            )  # fmt: skip
            tl.debug_barrier()  # the next one reads words that other threads may have written


@triton.jit(do_not_specialize=["start", "count", "first_row", "tiles"])
def pack_balanced_of_layers(
    table, like, record, offset, stride_row, stride_head, stride_token,
    start, count, first_row, heads, tiles, iterations,
    BALANCE: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Balance, quantize and pack tiles of several layers, given a table of the addresses of their buffers.

    Grid: (rows x H, tiles of 128 tokens, layers). `table` is int64 ``[layers, 7]``: the addresses of the storage of the
    tokens, of the words of both planes, of A, Z and C, and the segment's tag. `like` is a tensor with the dtype of the
    tokens, and `offset` that of the first token in its storage. The other arguments are those of :func:`pack_balanced`.
    """
    entry = table + tl.program_id(2) * 7
    # allocators align buffers to 16 bytes; without this hint, accesses through an address are not vectorized
    pack_balanced(
        tl.multiple_of(tl.load(entry).to(tl.pointer_type(like.dtype.element_ty)), 16) + offset,
        tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int16)), 16),
        tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.int16)), 16),
        tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float16)), 16),
        tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16),
        tl.multiple_of(tl.load(entry + 5).to(tl.pointer_type(tl.float16)), 16),
        record, stride_row, stride_head, stride_token,
        start, count, first_row, heads, tiles, tl.load(entry + 6).to(tl.int32), iterations,
        BALANCE, BITS, TOKENS, CHANNELS, VALUE,
    )  # fmt: skip
