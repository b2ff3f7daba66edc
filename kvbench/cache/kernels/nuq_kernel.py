"""Triton kernel that quantizes one new token per row to non-uniform levels, with its outliers (KVQuant).

The token's codes are stored among those of its tile, its outliers among those of its block.

A program takes the key or the value of a token over all heads, as a value's range and outliers are those of all heads.
The arithmetic is that of :mod:`kvbench.quantizers.nuq`. New outliers are inserted among those of the token's block,
whose entries are sorted by head, so the older ones of later heads move up. The position of the token is read from
device memory, so the launch can be recorded.

``[H, D]`` below is padded to powers of two.

Order statistics: a number's *sort key* is an integer, 0 to 65535, that sorts like it. A histogram of the upper bytes
tells in which bin an element lies, and one of the lower bytes of that bin's elements which of them it is. Ranks count
from 0 for the smallest element; padding has the largest key, 65535.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_plane(words, tiles, token, head, d, codes, there, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr):
    """Write one token's codes into a plane of words; the codes of other tokens in these words stay.

    Args:
        words: pointer to the plane of one row, int16 ``[H, tiles, ...]``.
        head: index of the head of each element.
        d: channel of each element.
        codes: codes of the plane, int32 ``[H, D]``.
        there: which elements exist.
        WIDTH: bits of a code in this plane.
        KEYS: True for the order of words of keys, False for that of values.
    """
    N: tl.constexpr = 8 * WIDTH
    field = token % 128 // N
    row = token % 128 % N
    base = (head.to(tl.int64) * tiles + token // 128) * (N * D)
    if KEYS:
        at = words + base + row * D + d
    else:
        at = words + base + d * N + row
    shift = field * WIDTH
    old = tl.load(at, mask=there, other=0).to(tl.int32)
    new = (old & ~(((1 << WIDTH) - 1) << shift)) | (codes << shift)
    tl.store(at, new.to(tl.int16), mask=there)


@triton.jit
def planes(
    WORDS, row, heads, tiles, token, head, d, codes, there, BITS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    """Write one token's codes into all planes of a row; arguments as for :func:`write_plane`."""
    if BITS == 3:
        write_plane(WORDS[0] + row * heads * tiles * (16 * D), tiles, token, head, d, codes >> 1, there, 2, D, KEYS)
        write_plane(WORDS[1] + row * heads * tiles * (8 * D), tiles, token, head, d, codes & 1, there, 1, D, KEYS)
    else:
        write_plane(WORDS[0] + row * heads * tiles * (8 * BITS * D), tiles, token, head, d, codes, there, BITS, D, KEYS)


@triton.jit
def insert(
    values, indices, table, token, x, outlier, head, d, heads, width, H: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Insert one token's outliers among the entries of its row.

    Args:
        values: pointer to the values of the row's entries.
        indices: pointer to their indices, int16.
        table: pointer to the ends of the row's entries, int32 ``[blocks, heads]``.
        x: the token's elements, ``[H, D]``.
        outlier: which of them are outliers.
        heads: number of heads that exist; H is padded.
        width: channels of a token over all heads.
        BLOCK: number of tokens of a block.
        ENTRIES: number of older entries to move at a time.
    """
    there = head < heads
    block = table + token // BLOCK * heads
    begin = tl.where(token >= BLOCK, tl.load(table + tl.maximum(token // BLOCK * heads - 1, 0)), 0)
    old_ends = tl.load(block + head, mask=there, other=0)
    # the table of a block is first written with its first token: until then, its runs are empty
    old_ends = tl.where(token % BLOCK > 0, old_ends, begin)
    stop = tl.max(tl.where(there, old_ends, 0), 0)
    marks = outlier.to(tl.int32)
    counts = tl.sum(marks, 1)
    before = tl.cumsum(counts, 0) - counts
    rank = before[:, None] + tl.cumsum(marks, 1) - marks
    # the entries of later heads first, so that none is overwritten before it has moved
    chunks = tl.cdiv(stop - begin, ENTRIES)
    for i in tl.range(0, chunks):
        at = begin + (chunks - 1 - i) * ENTRIES + tl.arange(0, ENTRIES)
        here = at < stop
        entry = tl.load(indices + at, mask=here, other=0)
        value = tl.load(values + at, mask=here, other=0.0)
        owner = (entry.to(tl.int32) & 65535) % width // D
        shift = tl.sum(tl.where(head[None, :] < owner[:, None], counts[None, :], 0), 1)
        tl.debug_barrier()
        tl.store(indices + at + shift, entry, mask=here)
        tl.store(values + at + shift, value, mask=here)
        tl.debug_barrier()
    at = old_ends[:, None] + rank
    index = token % BLOCK * width + head[:, None] * D + d[None, :]
    tl.store(indices + at, index.to(tl.int16), mask=outlier)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=outlier)
    tl.debug_barrier()
    tl.store(block + head, old_ends + before + counts, mask=there)


@triton.jit
def number_of(key, BF16: tl.constexpr):
    """Return the number, fp32, that has a sort key: the inverse of :func:`sort_key`."""
    bits = tl.where(key >= 32768, key - 32768, 65535 - key)
    if BF16:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def sort_key(x):
    """Return the sort keys, int32, of fp16 or bf16 numbers."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return tl.where(bits >= 32768, 65535 - bits, bits + 32768)


@triton.jit
def at_rank(counts, rank):
    """Return the bin of the element with a given rank, and its rank within that bin; `counts` of bins, ``[256]``."""
    upto = tl.cumsum(counts, 0)
    before = upto <= rank
    return tl.sum(before.to(tl.int32), 0), rank - tl.max(tl.where(before, upto, 0), 0)


@triton.jit
def within_bin(keys, byte, rank):
    """Return the sort key of the element with a given rank among the keys whose upper byte is `byte`."""
    # all other elements count as the largest of the bin, and so come after those of any rank in it
    low, _ = at_rank(tl.histogram(tl.where(keys >> 8 == byte, keys & 255, 255), 256), rank)
    return byte * 256 + low


@triton.jit
def statistics(keys, first, second, third, COUNT: tl.constexpr):
    """Return the sort keys of the elements with three given ranks."""
    keys = tl.reshape(keys, (COUNT,))
    counts = tl.histogram(keys >> 8, 256)
    a, a_rank = at_rank(counts, first)
    b, b_rank = at_rank(counts, second)
    c, c_rank = at_rank(counts, third)
    return within_bin(keys, a, a_rank), within_bin(keys, b, b_rank), within_bin(keys, c, c_rank)


@triton.jit
def following(keys, key, rank):
    """Return the sort key of the element with rank ``rank + 1``, given `key`, that of the element with rank `rank`."""
    upto = tl.sum(tl.sum((keys <= key).to(tl.int32), 1), 0)
    above = tl.min(tl.min(tl.where(keys > key, keys, 65536), 1), 0)
    return tl.where(upto > rank + 1, key, tl.minimum(above, 65535))


@triton.jit
def between(low, high, weight):
    """Interpolate linearly between two numbers, as ``torch.lerp`` does."""
    return tl.where(weight < 0.5, low + weight * (high - low), high - (high - low) * (1.0 - weight))


@triton.jit
def nearest(x, levels, BITS: tl.constexpr):
    """Return the codes of the levels (fp32) nearest to normalized elements (fp32), the first of equally near ones."""
    best = tl.abs(x - tl.load(levels))
    code = (x * 0.0).to(tl.int32)
    for i in tl.static_range(1, 1 << BITS):
        distance = tl.abs(x - tl.load(levels + i))
        code = tl.where(distance < best, i, code)
        best = tl.minimum(best, distance)
    return code


@triton.jit
def quantize_key(
    KEY_X, KEY_WORDS, key_levels, key_scale, key_offset, thresholds, KEY_ENTRIES, record, key_tag, x_strides, row,
    wide, token, head, there, heads, key_tiles, key_room, key_blocks,
    KEY_BITS: tl.constexpr, TABLES: tl.constexpr, KEY_DIM: tl.constexpr, H: tl.constexpr, OUTLIERS: tl.constexpr,
    WATCHED: tl.constexpr, KEY_BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Quantize and store the key of a token over all heads; arguments as for :func:`quantize_token`."""
    d = tl.arange(0, KEY_DIM)
    channel = head[:, None] * KEY_DIM + d[None, :]
    width = heads * KEY_DIM
    x = tl.load(KEY_X + wide * x_strides[0] + head[:, None] * x_strides[1] + d[None, :], mask=there, other=0.0)
    exact = x
    x = x.to(tl.float32)
    watch(x, record, key_tag, row, token, channel, KEY_DIM, WATCHED)
    param = wide * width + channel
    scale = tl.load(key_scale + param, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(key_offset + param, mask=there, other=0.0).to(tl.float32)
    levels = key_levels + row * (TABLES << KEY_BITS)
    normal = x - offset
    if OUTLIERS:
        upper = tl.load(thresholds + 2 * wide * width + channel, mask=there, other=0.0).to(tl.float32)
        lower = tl.load(thresholds + 2 * wide * width + width + channel, mask=there, other=0.0).to(tl.float32)
        outlier = ((x < lower) | (x > upper)) & there
        normal = tl.where(outlier, 0.0, normal)
    codes = nearest(tl.div_rn(normal, tl.where(scale == 0.0, 1.0, scale)), levels, KEY_BITS)
    planes(KEY_WORDS, wide, heads, key_tiles, token, head[:, None], d[None, :], codes, there, KEY_BITS, KEY_DIM, True)
    if OUTLIERS:
        insert(
            KEY_ENTRIES[0] + wide * key_room, KEY_ENTRIES[1] + wide * key_room,
            KEY_ENTRIES[2] + wide * key_blocks * heads, token, exact, outlier, head, d, heads, width, H,
            KEY_DIM, KEY_BLOCK, ENTRIES,
        )  # fmt: skip


@triton.jit
def quantize_value(
    VALUE_X, VALUE_WORDS, value_levels, value_scale, value_offset, VALUE_ENTRIES, record, value_tag, x_strides, row,
    wide, token, head, there, heads, value_tiles, value_room, value_blocks, low_rank, high_rank, low_weight,
    high_weight,
    VALUE_BITS: tl.constexpr, TABLES: tl.constexpr, VALUE_DIM: tl.constexpr, H: tl.constexpr, OUTLIERS:
    tl.constexpr, WATCHED: tl.constexpr, VALUE_BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Quantize and store the value of a token over all heads; arguments as for :func:`quantize_token`."""
    d = tl.arange(0, VALUE_DIM)
    channel = head[:, None] * VALUE_DIM + d[None, :]
    width = heads * VALUE_DIM
    x = tl.load(VALUE_X + wide * x_strides[2] + head[:, None] * x_strides[3] + d[None, :], mask=there, other=0.0)
    exact = x
    x = x.to(tl.float32)
    watch(x, record, value_tag, row, token, channel, VALUE_DIM, WATCHED)
    inner = x
    # no outliers, in the shape that the branch below gives them
    outlier = there & (channel < 0)
    if OUTLIERS:
        keys = tl.where(there, sort_key(exact), 65535)
        low, high, middle = statistics(keys, low_rank, high_rank, (width - 1) // 2, H * VALUE_DIM)
        BF16: tl.constexpr = VALUE_X.dtype.element_ty == tl.bfloat16
        next_low = number_of(following(keys, low, low_rank), BF16)
        next_high = number_of(following(keys, high, high_rank), BF16)
        least = between(number_of(low, BF16), next_low, low_weight)
        most = between(number_of(high, BF16), next_high, high_weight)
        outlier = ((x <= least) | (x >= most)) & there
        # an outlier counts as the token's median, so that a token of outliers alone has an offset
        inner = tl.where(outlier, number_of(middle, BF16), x)
    smallest = tl.min(tl.min(tl.where(there, inner, float("inf")), 1), 0)
    largest = tl.max(tl.max(tl.where(there, inner, float("-inf")), 1), 0)
    scale = tl.minimum((largest - smallest) / 2, 65504.0).to(tl.float16)
    offset = tl.minimum(tl.maximum((largest + smallest) / 2, -65504.0), 65504.0).to(tl.float16)
    at = wide * value_tiles * 128 + token
    tl.store(value_scale + at, scale)
    tl.store(value_offset + at, offset)
    normal = x - offset.to(tl.float32)
    normal = tl.where(outlier, 0.0, normal)
    scale = scale.to(tl.float32)
    scale = tl.where(scale == 0.0, 1.0, scale)
    levels = value_levels + row * (TABLES << VALUE_BITS)
    # `+ 0.0 * normal` gives the divisor the shape of the dividend
    codes = nearest(tl.div_rn(normal, scale + 0.0 * normal), levels, VALUE_BITS)
    planes(
        VALUE_WORDS, wide, heads, value_tiles, token, head[:, None], d[None, :], codes, there, VALUE_BITS, VALUE_DIM,
        False,
    )  # fmt: skip
    if OUTLIERS:
        insert(
            VALUE_ENTRIES[0] + wide * value_room, VALUE_ENTRIES[1] + wide * value_room,
            VALUE_ENTRIES[2] + wide * value_blocks * heads, token, exact, outlier, head, d, heads, width, H,
            VALUE_DIM, VALUE_BLOCK, ENTRIES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["key_tiles", "value_tiles", "key_room", "value_room", "key_blocks", "value_blocks"])
def quantize_token(
    KEY_X,
    VALUE_X,
    places,
    KEY_WORDS,
    VALUE_WORDS,
    key_levels,
    value_levels,
    key_scale,
    key_offset,
    thresholds,
    value_scale,
    value_offset,
    KEY_ENTRIES,
    VALUE_ENTRIES,
    record,
    key_tag,
    value_tag,
    x_strides,
    heads,
    key_tiles,
    value_tiles,
    key_room,
    value_room,
    key_blocks,
    value_blocks,
    low_rank,
    high_rank,
    low_weight,
    high_weight,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TABLES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    H: tl.constexpr,
    OUTLIERS: tl.constexpr,
    WATCHED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Quantize the key and the value of one new token per row, and store codes, ranges and outliers.

    Grid: (rows of the batch, 2). Programs with 0 in the second dimension take keys, those with 1 values.

    Args:
        KEY_X: pointer to the keys, ``[B, H, 1, D]``.
        VALUE_X: pointer to the values, ``[B, H, 1, Dv]``.
        places: pointer to int32 ``[B, 2]``: index of the token in the segments of keys and of values; negative to store
            nothing.
        KEY_WORDS, VALUE_WORDS: pointers to the planes of words.
        key_levels, value_levels: pointers to the codebooks, fp32 ``[B, TABLES, levels]``; the first is used.
        key_scale, key_offset: pointers to the ranges and the offsets of the channels, fp16 ``[B, C]``.
        thresholds: pointer to their upper and lower thresholds, fp16 ``[B, 2, C]``.
        value_scale, value_offset: pointers to the ranges and the offsets of the value tokens, fp16 ``[B, capacity]``,
            which the kernel writes.
        KEY_ENTRIES, VALUE_ENTRIES: pointers to the values, indices and ends of outliers; empty without outliers.
        record: pointer to the record of NaN and Inf (:class:`kvbench.cache.watch.Watch`), in which the tags name the
            segments; used only if `WATCHED`.
        x_strides: strides of keys over rows and heads, then those of values.
        key_tiles, value_tiles: number of tiles of a head in the words.
        key_room, value_room: number of entries per row in the buffers of outliers.
        key_blocks, value_blocks: number of blocks per row in the table of the outliers' ends.
        low_rank, high_rank: ranks of a value's elements below and above which outliers begin, rounded down.
        low_weight, high_weight: weights of the elements of the next ranks in the interpolation.
        TABLES: number of codebooks of a row: 1, or 2 if other levels are used for decoding than for encoding.
        H: number of heads, padded to a power of two.
        KEY_BLOCK, VALUE_BLOCK: tokens of a block of outliers.
        ENTRIES: number of older outliers to move at a time.
    """
    row = tl.program_id(0)
    side = tl.program_id(1)
    head = tl.arange(0, H)
    there = (head < heads)[:, None]
    wide = row.to(tl.int64)
    token = tl.load(places + 2 * row + side)
    if token < 0:  # a pass that is only rehearsed
        return
    if side == 0:
        quantize_key(
            KEY_X, KEY_WORDS, key_levels, key_scale, key_offset, thresholds, KEY_ENTRIES, record, key_tag,
            x_strides, row, wide, token, head, there, heads, key_tiles, key_room, key_blocks,
            KEY_BITS, TABLES, KEY_DIM, H, OUTLIERS, WATCHED, KEY_BLOCK, ENTRIES,
        )  # fmt: skip
    else:
        quantize_value(
            VALUE_X, VALUE_WORDS, value_levels, value_scale, value_offset, VALUE_ENTRIES, record, value_tag,
            x_strides, row, wide, token, head, there, heads, value_tiles, value_room, value_blocks, low_rank,
            high_rank, low_weight, high_weight,
            VALUE_BITS, TABLES, VALUE_DIM, H, OUTLIERS, WATCHED, VALUE_BLOCK, ENTRIES,
        )  # fmt: skip


@triton.jit
def watch(x, record, tag, row, token, channel, D: tl.constexpr, WATCHED: tl.constexpr):
    """Record the first NaN or Inf of a token, unless another one is recorded already.

    `channel` is the channel of each element over all heads; `D` the channels of a head.
    """
    if WATCHED:
        bad = ~(tl.abs(x) < float("inf"))
        first = tl.min(tl.min(tl.where(bad, channel, 1 << 30), 1), 0)
        if first < 1 << 30:  # noqa: SIM102 - only then may the record change
            if tl.atomic_cas(record, 0, 1) == 0:
                tl.store(record + 1, tag)
                tl.store(record + 2, row)
                tl.store(record + 3, first // D)
                tl.store(record + 4, token)
                tl.store(record + 5, first % D)
