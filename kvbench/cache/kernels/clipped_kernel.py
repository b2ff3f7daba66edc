"""Triton kernels that clip, quantize and pack tokens in 2 bits, bit for bit as OSCAR's quantizer does.

A program handles some word rows of one tile of one (row, KV head), with all channels. The threshold of a token is the
element at index `RANK` of its sorted absolute values. Its bits are found from the highest to the lowest: a bit is set
if at most `RANK` channels are below the number with that bit. All arithmetic is fp32; launches switch fused
multiply-adds off.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

#: word rows in a tile of 2-bit fields, and tokens in a word
WORD_ROWS = tl.constexpr(16)
FIELDS = tl.constexpr(8)
#: smallest range of a token (1e-8 in fp32)
LEAST = tl.constexpr(9.99999993922529e-09)
#: largest parameter that fp16 holds
MOST = tl.constexpr(65504.0)
#: greater than any offset in a tile
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def threshold(x, RANK: tl.constexpr, LOWEST: tl.constexpr):
    """Return the element of sorted |x| at index `RANK` of each row, fp32 ``[rows, 1]``.

    The numbers are fp32 ``[rows, channels]``, and `RANK` is less than the number of channels. The lowest `LOWEST` bits
    of every number are 0, because it comes from a shorter dtype.
    """
    size = tl.abs(x).to(tl.int32, bitcast=True)  # of numbers that are not negative, the bits have the same order
    limit = tl.zeros((x.shape[0], 1), tl.int32)
    for step in tl.static_range(31 - LOWEST):
        higher = limit | (1 << (30 - step))
        below = tl.sum((size < higher).to(tl.int32), 1, keep_dims=True)
        limit = tl.where(below <= RANK, higher, limit)
    return limit.to(tl.float32, bitcast=True)


@triton.jit
def encode_clipped(x, RANK: tl.constexpr, LOWEST: tl.constexpr):
    """Return codes, scales and minima of tokens (:meth:`kvbench.quantizers.oscar.OscarQuantizer.uniform`).

    Args:
        x: tokens, fp32 ``[rows, channels]``.
        RANK: index of the threshold among sorted |x|; the number of channels for no clipping.
        LOWEST: as for :func:`threshold`.

    Returns:
        The codes, int32 in the shape of `x`, and scale and minimum, fp32 ``[rows, 1]``.
    """
    if x.shape[1] > RANK:
        limit = threshold(x, RANK, LOWEST)
        x = tl.maximum(tl.minimum(x, limit), -limit)
    low = tl.min(x, 1, keep_dims=True) + 0.0
    high = tl.max(x, 1, keep_dims=True) + 0.0
    span = tl.maximum(high - low, LEAST)
    scale = tl.div_rn(span, tl.full(span.shape, 3.0, tl.float32))
    zero = tl.div_rn(-low, scale)
    place = tl.div_rn(x, tl.broadcast_to(scale, x.shape)) + zero + 0.5
    codes = tl.minimum(tl.maximum(place, 0.0), 3.0).to(tl.int32)
    return codes, scale, low


@triton.jit
def pack_clipped_rows(
    x, index, words, scales, minima, record, stride_token, start, count, line, row, head, tile, word_row, tiles, tag,
    RANK: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Quantize the tokens of some word rows of a tile, and write their codes and parameters.

    Args:
        x: pointer to the first token of the row and head, channels contiguous.
        index: if `INDEXED`, pointer to the indices of the tokens to pack; else ignored.
        words: pointer to the words of codes.
        scales: pointer to the scales, fp16 ``[B, H, tiles * 128]``.
        minima: pointer to the minima, likewise.
        record: pointer to where the location of the first NaN or Inf is stored.
        start: index, within the segment, of the first token to write.
        line: number of the row and head in the segment's buffers; `row` and `head` are for `record`.
        word_row: word rows of the program, ``[ROWS]``.
        tag: number that identifies the segment in `record`.
        RANK: index of the threshold of clipping among sorted absolute values; `DIM` for no clipping.
        DIM: channels of a head, a power of two.
        VALUE: True for the word order of values, False for that of keys.
    """
    LOWEST: tl.constexpr = 16 if x.dtype.element_ty == tl.bfloat16 else 13
    channel = tl.arange(0, DIM)
    word = tl.zeros((ROWS, DIM), tl.int32)
    written = tl.zeros((ROWS,), tl.int32)
    worst = NOWHERE
    for f in range(FIELDS):
        token = tile * 128 + f * WORD_ROWS + word_row
        valid = (token >= start) & (token < start + count)
        if tl.max(valid.to(tl.int32), 0) != 0:
            source = (token - start).to(tl.int64)
            if INDEXED:
                source = tl.load(index + source, mask=valid, other=0).to(tl.int64)
            # `channel >= 0` is always true: it gives the mask its shape
            known = valid[:, None] & (channel >= 0)[None, :]
            values = tl.load(x + source[:, None] * stride_token + channel[None, :], mask=known, other=0.0)
            values = values.to(tl.float32)
            odd = known & ((values - values) != 0.0)
            place = f * (WORD_ROWS * DIM) + word_row[:, None] * DIM + channel[None, :]
            worst = tl.minimum(worst, tl.min(tl.min(tl.where(odd, place, NOWHERE), 1), 0))
            codes, scale, low = encode_clipped(values, RANK, LOWEST)
            target = line * (tiles * 128) + token[:, None]
            scale = tl.minimum(tl.maximum(scale, 0.0), MOST)
            low = tl.minimum(tl.maximum(low, -MOST), MOST)
            tl.store(scales + target, scale.to(tl.float16), mask=valid[:, None])
            tl.store(minima + target, low.to(tl.float16), mask=valid[:, None])
            word |= codes << (f * 2)
            written |= tl.where(valid, 3 << (f * 2), 0)
    base = (line * tiles + tile) * (WORD_ROWS * DIM)
    if VALUE:
        where = words + base + channel[None, :] * WORD_ROWS + word_row[:, None]
    else:
        where = words + base + word_row[:, None] * DIM + channel[None, :]
    some = tl.broadcast_to((written != 0)[:, None], word.shape)
    old = tl.load(where, mask=some, other=0).to(tl.int32) & 0xFFFF  # other fields hold tokens of earlier appends
    tl.store(where, ((old & ~written[:, None]) | (word & written[:, None])).to(tl.int16), mask=some)
    # only the first program to find one records it, as the host reports a single place (`and` would run both)
    if worst != NOWHERE:  # noqa: SIM102
        if tl.atomic_cas(record, 0, 1) == 0:
            tl.store(record + 1, tag)
            tl.store(record + 2, row)
            tl.store(record + 3, head)
            tl.store(record + 4, tile * 128 + worst // DIM)
            tl.store(record + 5, worst % DIM)


@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "tag"])
def pack_clipped_tokens(
    x, index, words, scales, minima, record, stride_row, stride_head, stride_token,
    start, count, first_row, first_part, heads, tiles, tag,
    RANK: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Quantize tokens and write their codes and parameters into a segment.

    Grid: (rows x H, programs). Strides are those of `x`, ``[rows, H, n, D]``, in elements; `first_row` is the row of
    the segment to which row 0 of `x` belongs, and `first_part` the number of programs of the first tile that are not
    launched. The other arguments are those of :func:`pack_clipped_rows`.
    """
    PARTS: tl.constexpr = WORD_ROWS // ROWS
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    part = tl.program_id(1) + first_part
    tile, word_row = start // 128 + part // PARTS, part % PARTS * ROWS + tl.arange(0, ROWS)
    line = (first_row + row).to(tl.int64) * heads + head
    begin = x + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    pack_clipped_rows(
        begin, index, words, scales, minima, record, stride_token, start, count, line, first_row + row, head, tile,
        word_row, tiles, tag, RANK, DIM, VALUE, ROWS, INDEXED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles"])
def pack_clipped_layers(
    table, like, record, offset, stride_row, stride_head, stride_token,
    start, count, first_row, first_part, heads, tiles,
    RANK: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize and pack tokens of several layers, given a table of the addresses of their buffers.

    Grid: (rows x H, programs, layers). `table` is int64 ``[layers, 6]``: the addresses of the storage of the tokens, of
    the words (twice), of scales and minima, and the segment's tag. `like` is a tensor with the dtype of the tokens, and
    `offset` is that of the first token in its storage. The other arguments are those of :func:`pack_clipped_tokens`.
    """
    entry = table + tl.program_id(2) * 6
    x = tl.load(entry).to(tl.pointer_type(like.dtype.element_ty)) + offset
    words = tl.load(entry + 1).to(tl.pointer_type(tl.int16))
    scales = tl.load(entry + 3).to(tl.pointer_type(tl.float16))
    minima = tl.load(entry + 4).to(tl.pointer_type(tl.float16))
    pack_clipped_tokens(
        x, x, words, scales, minima, record, stride_row, stride_head, stride_token,
        start, count, first_row, first_part, heads, tiles, tl.load(entry + 5).to(tl.int32),
        RANK, DIM, VALUE, ROWS, False,
    )  # fmt: skip
