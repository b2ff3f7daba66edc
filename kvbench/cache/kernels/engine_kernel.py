"""Triton kernels that quantize tokens to the format of an inference engine and pack them into a segment.

A program handles some word rows of one tile of one (row, KV head), with all channels. Three entries share the code: one
for tokens of one segment, one for tokens of the segments of many layers, and one for the new token of a captured step,
whose place is read from device memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.cache.kernels.engine_math import encode_engine, encode_key, encode_octave, encode_value

#: word rows in a tile of 4-bit fields; with 3 bits, those of the plane of 2 bits, and of the plane of 1 bit
WORD_ROWS = tl.constexpr(32)
UPPER_ROWS = tl.constexpr(16)
LAST_ROWS = tl.constexpr(8)
#: greater than any offset in a tile
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def put(words, word, written, base, row, channel, there, N: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr):
    """Write words of a tile; only the bits set in `written` change.

    Args:
        words: pointer to the words of the segment.
        word: the words to write, int32 ``[rows, channels]``.
        written: bits to write in each word row, ``[rows]``.
        base: offset of the tile's first word.
        row: word rows, ``[rows]``.
        channel: channels, ``[channels]``.
        there: mask of the channels that exist.
        N: number of word rows in a tile.
        VALUE: True for the word order of values, False for that of keys.
    """
    if VALUE:
        place = words + base + channel[None, :] * N + row[:, None]
    else:
        place = words + base + row[:, None] * DIM + channel[None, :]
    some = (written != 0)[:, None] & there[None, :]
    old = tl.load(place, mask=some, other=0).to(tl.int32) & 0xFFFF
    mixed = (old & ~written[:, None]) | (word & written[:, None])
    tl.store(place, mixed.to(tl.int16), mask=some)


@triton.jit
def pack_engine_rows(
    x, index, upper_words, lower_words, scales, minima, record, factor, stride_token,
    start, count, line, row, head, tile, word_row, tiles, tag,
    RULE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TABLE: tl.constexpr, PADDING: tl.constexpr, INDEXED: tl.constexpr,
    WATCHED: tl.constexpr,
):  # fmt: skip
    """Quantize the tokens of some word rows of a tile, and write their codes and parameters.

    Args:
        x: pointer to the first token of the row and head, channels contiguous.
        index: if `INDEXED`, pointer to the indices of the tokens to pack; else ignored.
        upper_words: pointer to the words of codes (8 bits: of upper nibbles; 3 bits: of the upper two bits).
        lower_words: for 8 bits, pointer to the words of lower nibbles; for 3 bits, to those of the lowest bits.
        scales: pointer to the parameters, ``[B, H, tiles * 128, groups + PADDING]``; ignored by rules without
            parameters.
        minima: likewise, for rules with a second parameter.
        record: pointer to where the location of the first NaN or Inf is stored.
        factor: the one scale of all keys or values.
        start: index, within the segment, of the first token to write.
        line: number of the row and head in the segment's buffers; `row` and `head` are for `record`.
        word_row: word rows of the program, ``[ROWS]``; with 3 bits r and r + 8, which share a word of lowest bits.
        tag: number that identifies the segment in `record`.
        BITS: 3, 4 or 8.
        GROUP: channels per group, at most `CHANNELS`.
        VALUE: True for the word order of values.
        CHANNELS: `DIM`, the channels of a head, rounded up to a power of two.
        TABLE: for TurboQuant's keys, midpoints between levels and levels.
        PADDING: number of unused parameters after those of a token.
        WATCHED: True to record NaN and Inf.
    """
    GROUPS: tl.constexpr = CHANNELS // GROUP
    channel = tl.arange(0, CHANNELS)
    there = channel < DIM
    upper = tl.zeros((ROWS, CHANNELS), tl.int32)
    lower = tl.zeros((ROWS, CHANNELS), tl.int32)
    written = tl.zeros((ROWS,), tl.int32)
    written_last = tl.zeros((ROWS,), tl.int32)
    worst = NOWHERE
    N: tl.constexpr = UPPER_ROWS if BITS == 3 else WORD_ROWS
    for f in range(128 // N):
        token = tile * 128 + f * N + word_row
        valid = (token >= start) & (token < start + count)
        if tl.max(valid.to(tl.int32), 0) != 0:
            source = (token - start).to(tl.int64)
            if INDEXED:
                source = tl.load(index + source, mask=valid, other=0).to(tl.int64)
            known = valid[:, None] & there[None, :]
            values = tl.load(x + source[:, None] * stride_token + channel[None, :], mask=known, other=0.0)
            values = values.to(tl.float32)
            if WATCHED:
                odd = known & ((values - values) != 0.0)
                place = f * (N * DIM) + word_row[:, None] * DIM + channel[None, :]
                worst = tl.minimum(worst, tl.min(tl.min(tl.where(odd, place, NOWHERE), 1), 0))
            if RULE == "levels" or RULE == "levels_write":
                codes, param = encode_key(values, there, RULE, BITS, ROWS, CHANNELS, TABLE)
            elif RULE == "grid":
                codes, param, minimum = encode_value(values, there, BITS, ROWS, CHANNELS)
                minimum = tl.minimum(tl.maximum(minimum, -65504.0), 65504.0)
                tl.store(minima + line * (tiles * 128) + token, minimum.to(minima.dtype.element_ty), mask=valid)
            elif RULE == "octave":
                blocks = tl.reshape(values, (ROWS * GROUPS, GROUP))
                codes, param = encode_octave(blocks, BITS, ROWS * GROUPS, GROUP, GROUP if GROUP < DIM else DIM)
                codes = tl.reshape(codes, (ROWS, CHANNELS))
            else:
                here = tl.reshape(there, (1, GROUPS, GROUP))
                codes, param = encode_engine(tl.reshape(values, (ROWS, GROUPS, GROUP)), here, factor, RULE)
                codes = tl.reshape(codes, (ROWS, CHANNELS))
            if RULE != "fp8":
                column = tl.arange(0, GROUPS)
                WIDTH: tl.constexpr = (DIM // GROUP if GROUP < DIM else 1) + PADDING
                target = (line * (tiles * 128) + token[:, None]) * WIDTH + column[None, :]
                keep = valid[:, None] & (column * GROUP < DIM)[None, :]
                param = tl.reshape(param, (ROWS, GROUPS))
                if scales.dtype.element_ty == tl.float16:
                    param = tl.minimum(tl.maximum(param, -65504.0), 65504.0)
                tl.store(scales + target, param.to(scales.dtype.element_ty), mask=keep)
            if BITS == 8:
                lower |= (codes & 15) << (f * 4)
                codes = codes >> 4
            if BITS == 3:
                place_last = f * 2 + word_row // LAST_ROWS
                upper |= (codes >> 1) << (f * 2)
                lower |= (codes & 1) << place_last[:, None]
                written |= tl.where(valid, 3 << (f * 2), 0)
                written_last |= tl.where(valid, 1 << place_last, 0)
            else:
                upper |= (codes & 15) << (f * 4)
                written |= tl.where(valid, 15 << (f * 4), 0)
    base = (line * tiles + tile) * (N * DIM)
    put(upper_words, upper, written, base, word_row, channel, there, N, DIM, VALUE)
    if BITS == 8:
        put(lower_words, lower, written, base, word_row, channel, there, N, DIM, VALUE)
    if BITS == 3:  # the rows' bits of a word are different ones, so they may be added
        last = tl.min(word_row, 0) + tl.arange(0, 1)
        base = (line * tiles + tile) * (LAST_ROWS * DIM)
        lower, written = tl.sum(lower, 0)[None, :], tl.sum(written_last, 0) + tl.zeros((1,), tl.int32)
        put(lower_words, lower, written, base, last, channel, there, LAST_ROWS, DIM, VALUE)
    # only the first program to find one records it, as the host reports a single place (`and` would run both)
    if worst != NOWHERE:  # noqa: SIM102
        if tl.atomic_cas(record, 0, 1) == 0:
            tl.store(record + 1, tag)
            tl.store(record + 2, row)
            tl.store(record + 3, head)
            tl.store(record + 4, tile * 128 + worst // DIM)
            tl.store(record + 5, worst % DIM)


@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "tag", "factor"])
def pack_engine_row_tokens(
    x, index, upper_words, lower_words, scales, minima, record, factor, stride_row, stride_head, stride_token,
    start, count, first_row, first_part, heads, tiles, tag,
    RULE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TABLE: tl.constexpr, PADDING: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Quantize tokens and write their codes and parameters into a segment.

    Grid: (rows x H, programs). Strides are those of `x`, ``[rows, H, n, D]``, in elements; `first_row` is the row of
    the segment to which row 0 of `x` belongs, and `first_part` the number of programs of the first tile that are not
    launched. The other arguments are those of :func:`pack_engine_rows`.
    """
    PARTS: tl.constexpr = LAST_ROWS if BITS == 3 else WORD_ROWS // ROWS
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    part = tl.program_id(1) + first_part
    tile, word_row = start // 128 + part // PARTS, part % PARTS * ROWS + tl.arange(0, ROWS)
    if BITS == 3:
        word_row = part % PARTS + LAST_ROWS * tl.arange(0, 2)
    line = (first_row + row).to(tl.int64) * heads + head
    begin = x + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    pack_engine_rows(
        begin, index, upper_words, lower_words, scales, minima, record, factor, stride_token, start, count, line,
        first_row + row, head, tile, word_row, tiles, tag,
        RULE, BITS, GROUP, DIM, VALUE, ROWS, CHANNELS, TABLE, PADDING, INDEXED, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "factor"])
def pack_engine_layers(
    table, like, scale_like, record, offset, factor, stride_row, stride_head, stride_token,
    start, count, first_row, first_part, heads, tiles,
    RULE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TABLE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Quantize and pack tokens of several layers, given a table of the addresses of their buffers.

    Grid: (rows x H, programs, layers). `table` is int64 ``[layers, 6]``: the addresses of the storage of the tokens, of
    the upper and the lower words, of the first and the last parameters, and the segment's tag. `like` and `scale_like`
    are tensors with the dtypes of tokens and of parameters, and `offset` is that of the first token in its storage. The
    other arguments are those of :func:`pack_engine_row_tokens`.
    """
    entry = table + tl.program_id(2) * 6
    x = tl.load(entry).to(tl.pointer_type(like.dtype.element_ty)) + offset
    upper_words = tl.load(entry + 1).to(tl.pointer_type(tl.int16))
    lower_words = tl.load(entry + 2).to(tl.pointer_type(tl.int16))
    scales = tl.load(entry + 3).to(tl.pointer_type(scale_like.dtype.element_ty))
    minima = tl.load(entry + 4).to(tl.pointer_type(scale_like.dtype.element_ty))
    pack_engine_row_tokens(
        x, x, upper_words, lower_words, scales, minima, record, factor, stride_row, stride_head, stride_token,
        start, count, first_row, first_part, heads, tiles, tl.load(entry + 5).to(tl.int32),
        RULE, BITS, GROUP, DIM, VALUE, ROWS, CHANNELS, TABLE, PADDING, False,
    )  # fmt: skip


@triton.jit
def rows_of(token, BITS: tl.constexpr):
    """Return the word rows to process for a token: its own row and, with 3 bits, the row 8 below or above it.

    Rows r and r + 8 of 3-bit codes share the words that hold the lowest bits.
    """
    if BITS == 3:
        rows = token % LAST_ROWS + LAST_ROWS * tl.arange(0, 2)
    else:
        rows = token % WORD_ROWS + tl.arange(0, 1)
    return rows


@triton.jit
def pack_step(
    key, value, places, key_upper, key_lower, key_params, value_upper, value_lower, value_params, value_minima, record,
    key_tag, value_tag, key_factor, value_factor, key_row, key_head, value_row, value_head, heads,
    key_tiles, value_tiles,
    KEY_RULE: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    KEY_CHANNELS: tl.constexpr, KEY_TABLE: tl.constexpr, VALUE_RULE: tl.constexpr, VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_PADDING: tl.constexpr,
    WATCHED: tl.constexpr,
):  # fmt: skip
    """Quantize and pack the key and the value of one new token per row, at places read from device memory.

    Grid: (B x H, 2): programs with 0 in the last dimension pack keys, those with 1 values. `places` is int32 ``[B, 2]``
    with the index of each row's key and value in the segments, or a negative number to store nothing. Only parameters
    of values are padded. The other
    arguments are those of :func:`pack_engine_rows`, for each side.
    """
    line, side = tl.program_id(0), tl.program_id(1)
    row, head = line // heads, line % heads
    start = tl.load(places + 2 * row + side)
    line, wide = line.to(tl.int64), row.to(tl.int64)
    if start >= 0:
        if side == 0:
            pack_engine_rows(
                key + wide * key_row + head * key_head, key, key_upper, key_lower, key_params, key_params, record,
                key_factor, 0, start, 1, line, row, head, start // 128, rows_of(start, KEY_BITS), key_tiles, key_tag,
                KEY_RULE, KEY_BITS, KEY_GROUP, KEY_DIM, False, 2 if KEY_BITS == 3 else 1, KEY_CHANNELS, KEY_TABLE,
                0, False, WATCHED,
            )  # fmt: skip
        else:
            pack_engine_rows(
                value + wide * value_row + head * value_head, value, value_upper, value_lower, value_params,
                value_minima, record, value_factor, 0, start, 1, line, row, head, start // 128,
                rows_of(start, VALUE_BITS), value_tiles, value_tag, VALUE_RULE, VALUE_BITS, VALUE_GROUP, VALUE_DIM,
                True, 2 if VALUE_BITS == 3 else 1, VALUE_CHANNELS, (), VALUE_PADDING, False, WATCHED,
            )  # fmt: skip
