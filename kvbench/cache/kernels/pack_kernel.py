"""Triton kernel that quantizes and packs full-precision tokens into the words and parameters of a segment.

A program handles a part of one tile of one (row, KV head): some word rows with all their fields, and some channels. It
reads each token once, finds the extremes of its groups, and writes words and parameters in place, without an
intermediate tensor. The arithmetic (:mod:`~kvbench.cache.kernels.pack_math`) equals that of the quantizers bit for bit.

A group is always within one part. The fields of tokens that an append does not cover keep their contents.

Names: a *pair* is an int32 that holds two neighbouring channels; names that end in ``0`` and ``1`` belong to its lower
and its upper channel. ``HALF`` is True for fp16 tokens, False for bf16. docs/kernels.md draws words and tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.cache.kernels.pack_half import affine16, atom16, hierarchical16
from kvbench.cache.kernels.pack_math import (
    affine32,
    affine_params,
    atom32,
    atom_params,
    bit_pair,
    half_pair,
    high_half,
    larger,
    largest,
    low_half,
    lower32,
    reciprocal,
    share,
    smaller,
    smallest,
)


@triton.jit
def group_params(low, high, KIND: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr):
    """Compute the quantization parameters of groups from the smallest and the largest element of each, in fp32.

    Args:
        KIND: ``affine``, ``hierarchical`` or ``atom``.
        LEVELS: the largest code (hierarchical: the largest upper nibble).

    Returns:
        Four fp32 blocks in the shape of `low`: the scale; the minimum (``atom``: the zero point); 1 / scale; and 1 or
        1/4, by which a group must be multiplied so that nothing overflows while its codes are computed in fp16
        (:func:`kvbench.cache.kernels.pack_math.share`).
    """
    part = tl.full(low.shape, 1.0, tl.float32)
    if KIND == "atom":
        scale, base = atom_params(low, high, LEVELS, HALF)
    else:
        scale, base = affine_params(low, high, LEVELS, HALF)
        if HALF:
            part = share(scale, base, high, LEVELS)
    return scale, base, reciprocal(scale), part


@triton.jit
def encode_pairs(
    x, scale0, scale1, base0, base1, r0, r1, part0, part1,
    KIND: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Quantize pairs of elements with the parameters of their groups (:func:`group_params`).

    Returns:
        Two blocks of pairs. If `KIND` is ``hierarchical``, they are the upper and the lower nibbles of the codes;
        otherwise both are the codes. Each is in the low bits of its 16 bits; the other bits are not zero.
    """
    if HALF:
        if KIND == "atom":
            codes = atom16(x, r0, r1, base0, base1, LEVELS)
            lower = codes
        else:
            # divide by share * scale; the share is 1 or 1/4
            r0, r1 = r0 * tl.where(part0 == 1.0, 1.0, 4.0), r1 * tl.where(part1 == 1.0, 1.0, 4.0)
            base0, base1 = base0 * part0, base1 * part1
            if KIND == "hierarchical":
                codes, lower = hierarchical16(x, part0, part1, base0, base1, r0, r1, scale0, scale1)
            else:
                codes = affine16(x, part0, part1, base0, base1, r0, r1, LEVELS)
                lower = codes
    else:
        x0, x1 = low_half(x, False), high_half(x, False)
        if KIND == "atom":
            codes = bit_pair(atom32(x0, scale0, base0, r0, LEVELS), atom32(x1, scale1, base1, r1, LEVELS))
            lower = codes
        else:
            code0, number0 = affine32(x0, scale0, base0, r0, LEVELS)
            code1, number1 = affine32(x1, scale1, base1, r1, LEVELS)
            codes = bit_pair(code0, code1)
            lower = codes
            if KIND == "hierarchical":
                code0, code1 = lower32(x0, number0, scale0, base0, r0), lower32(x1, number1, scale1, base1, r1)
                lower = bit_pair(code0, code1)
    return codes, lower


@triton.jit
def woven(bits):
    """Combine the lowest bits of 3-bit codes from 16 rows of words into the 8 rows of a plane of 1 bit.

    Args:
        bits: int32 ``[16, n]``. The bit of field f is bit 2 f (and 2 f + 16, of the neighbouring channel).

    Returns:
        int32 ``[8, n]``: in row r, bits 2 f are those of row r, bits 2 f + 1 those of row r + 8.
    """
    halves = tl.reshape(bits, (2, 8, bits.shape[1]))
    return tl.sum(halves << tl.arange(0, 2)[:, None, None], 0)  # no bit is in both


@triton.jit
def put_words(
    words, pairs, written, whole, base, row, pair, HEAD_DIM: tl.constexpr, WORD_ROWS: tl.constexpr, VALUE: tl.constexpr
):
    """Write a program's words into a tile without changing the codes of tokens that were packed earlier.

    A tile is stored as rows of int16 words (word rows). A word contains the codes of several tokens, so only the bits
    set in `written` are changed, unless `whole` is True.

    Args:
        words: pointer to the words of the segment.
        pairs: the words to write, ``[rows, channels / 2]``. Each int32 contains the words of two neighbouring channels.
        written: for each word row, a mask of the bits to write, which are those of the tokens being packed, ``[rows]``.
        whole: True if all tokens of the tile are being packed, so that the old words need not be read.
        base: offset of the tile's first word from `words`.
        row: indices of the program's word rows within the tile, ``[rows]``.
        pair: indices of the program's pairs of channels, ``[channels / 2]``.
        WORD_ROWS: number of word rows in a tile.
        VALUE: True for the word order of values, ``[channels, rows]``; False for that of keys, ``[rows, channels]``.
    """
    ROWS: tl.constexpr = pairs.shape[0]
    PAIRS: tl.constexpr = pairs.shape[1]
    if VALUE:
        # word rows are contiguous, so the two halves of a pair are not adjacent and are split
        both = tl.join((pairs & 0xFFFF).to(tl.int16), ((pairs >> 16) & 0xFFFF).to(tl.int16))
        word = tl.trans(tl.reshape(both, (ROWS, PAIRS * 2)))
        channel = (tl.min(pair, 0) * 2) + tl.arange(0, PAIRS * 2)
        place = words + base + channel[:, None] * WORD_ROWS + row[None, :]
        covered = written[None, :]
    else:
        # channels are contiguous, so a pair of words is one 32-bit store
        word = pairs
        place = (words + base).to(tl.pointer_type(tl.int32)) + row[:, None] * (HEAD_DIM // 2) + pair[None, :]
        covered = (written | (written << 16))[:, None]
    if whole:
        tl.store(place, word)
    else:
        # other fields of these words hold tokens of earlier appends
        some = tl.broadcast_to(covered != 0, word.shape)
        old = tl.load(place, mask=some, other=0).to(tl.int32)
        mixed = (old & ~covered) | (word.to(tl.int32) & covered)
        tl.store(place, mixed.to(place.dtype.element_ty), mask=some)


# Not specialized: arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "param_rows", "tag"])
def pack_tiles(
    x,
    index,
    upper_words,
    lower_words,
    scales,
    bases,
    record,
    stride_row,
    stride_head,
    stride_token,
    start,
    count,
    first_row,
    first_part,
    heads,
    tiles,
    param_rows,
    tag,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Quantize tokens and write their codes and parameters into a segment.

    Grid: (rows x H, programs). The programs of one tile are adjacent (:func:`kvbench.cache.kernels.jobs.programs`).
    The strides over rows, heads and tokens are those of `x`, in pairs of elements.

    Args:
        x: pointer to the tokens, ``[rows, H, n, D]``, channels contiguous.
        index: if `INDEXED`, pointer to the indices of the tokens to pack, ``[count]``; else ignored.
        upper_words: pointer to the words of codes, int16 ``[B, H, tiles, ...]``
            (:class:`kvbench.cache.segments.layout.TileLayout`). For 8-bit codes, the words of their upper nibbles; for
            3-bit codes, those of their upper two bits.
        lower_words: for 8-bit codes, pointer to the words of their lower nibbles; for 3-bit codes, to the words of
            their lowest bits; else the same as `upper_words`.
        scales: pointer to the scales, fp16 ``[B, H, param_rows, ...]``: one for each group of tokens and each channel,
            or one for each token and each group of channels.
        bases: pointer to the minima or zero points, in the dtype and shape of `scales`.
        record: pointer to where the location of the first NaN or Inf is stored, int32 ``[6]``: found (0 or 1), tag,
            row, head, token, channel.
        start: index, within the segment, of the first token to write.
        count: number of tokens to write.
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        first_part: number of programs of the tile of token `start` that have nothing to do and are not launched.
        tag: number that identifies the segment in `record`.
        KIND: ``affine``, ``hierarchical`` or ``atom``.
        BITS: bits of a code: 2, 3, 4 or 8.
        BY_CHANNEL: True if a group consists of GROUP tokens of one channel, False if of GROUP channels of one token.
        VALUE: True for the word order of values, False for that of keys.
        ROWS: number of word rows that a program processes (if BY_CHANNEL or with 3 bits, all word rows of a tile).
        CHANNELS: number of channels that a program processes.
        INDEXED: True to pack the tokens listed in `index`, False to pack all tokens of `x`.
    """
    WIDTH: tl.constexpr = 2 if BITS < 4 else 4
    FIELDS: tl.constexpr = 16 // WIDTH
    WORD_ROWS: tl.constexpr = 128 // FIELDS
    PAIRS: tl.constexpr = CHANNELS // 2
    ACROSS: tl.constexpr = HEAD_DIM // CHANNELS
    PARTS: tl.constexpr = (WORD_ROWS // ROWS) * ACROSS
    LEVELS: tl.constexpr = 15 if KIND == "hierarchical" else (1 << BITS) - 1
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    FIELD: tl.constexpr = ((1 << WIDTH) - 1) * 0x10001
    # a field has SETS groups of tokens, or JOINT fields share a group; AXIS is the dimension to reduce
    SETS: tl.constexpr = (ROWS // GROUP if GROUP < ROWS else 1) if BY_CHANNEL else ROWS
    JOINT: tl.constexpr = (GROUP // ROWS if GROUP > ROWS else 1) if BY_CHANNEL else 1
    AXIS: tl.constexpr = 1 if BY_CHANNEL else 2
    WIDE: tl.constexpr = PAIRS if BY_CHANNEL else GROUP // 2

    SHAPE: tl.constexpr = (SETS, ROWS // SETS if BY_CHANNEL else PAIRS // WIDE, WIDE)

    # Heads vary fastest: a token's heads are adjacent in memory, so neighbouring programs read adjacent addresses.
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    part = tl.program_id(1) + first_part
    tile, part = start // 128 + part // PARTS, part % PARTS
    word_row = part // ACROSS * ROWS + tl.arange(0, ROWS)
    pair = part % ACROSS * PAIRS + tl.arange(0, PAIRS)
    begin = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    both = (first_row + row).to(tl.int64) * heads + head
    stop = start + count

    # token of field f, word row r: f * WORD_ROWS + r; all loads are issued before the first use
    values = ()
    written = tl.zeros((ROWS,), tl.int32)
    lowest = tl.zeros((ROWS,), tl.int32)
    for f in tl.static_range(FIELDS):
        token = tile * 128 + f * WORD_ROWS + word_row
        valid = (token >= start) & (token < stop)
        source = (token - start).to(tl.int64)
        if INDEXED:
            source = tl.load(index + source, mask=valid, other=0).to(tl.int64)
        where = begin + source[:, None] * stride_token + pair[None, :]
        values = values + (tl.load(where, mask=tl.broadcast_to(valid[:, None], (ROWS, PAIRS)), other=0),)
        written |= tl.where(valid, (FIELD & 0xFFFF) << (f * WIDTH), 0)
        lowest |= tl.where(valid, 1 << (2 * f), 0)

    # words are assembled in registers, field by field, and written once
    upper = tl.zeros((ROWS, PAIRS), tl.int32)
    lower = tl.zeros((ROWS, PAIRS), tl.int32)
    odd = tl.zeros((SETS, 1, PAIRS) if BY_CHANNEL else (SETS, PAIRS // WIDE, 1), tl.float32)
    for g in tl.static_range(FIELDS // JOINT):
        least = values[g * JOINT]
        most = least
        for j in tl.static_range(1, JOINT):
            least, most = smaller(least, values[g * JOINT + j], HALF), larger(most, values[g * JOINT + j], HALF)
        # fields of one group are first compared in registers, so that threads synchronize only once
        least = smallest(tl.reshape(least, SHAPE), AXIS, HALF)
        most = largest(tl.reshape(most, SHAPE), AXIS, HALF)
        low0, low1 = low_half(least, HALF), high_half(least, HALF)
        high0, high1 = low_half(most, HALF), high_half(most, HALF)
        # NaN and Inf appear in an extreme of their group, for which x - x is NaN, otherwise 0
        odd += (low0 - low0) + (low1 - low1) + (high0 - high0) + (high1 - high1)
        # + 0 turns -0 into 0, as in the quantizers
        if BY_CHANNEL:
            scale0, base0, r0, part0 = group_params(low0 + 0.0, high0 + 0.0, KIND, LEVELS, HALF)
            scale1, base1, r1, part1 = group_params(low1 + 0.0, high1 + 0.0, KIND, LEVELS, HALF)
        else:
            # groups are over channels, so both halves of a pair are in one group
            low0, high0 = tl.minimum(low0, low1), tl.maximum(high0, high1)
            scale0, base0, r0, part0 = group_params(low0 + 0.0, high0 + 0.0, KIND, LEVELS, HALF)
            scale1, base1, r1, part1 = scale0, base0, r0, part0
        if BY_CHANNEL:
            # the parameters of two neighbouring channels are one 32-bit store, too
            entry = tile * (128 // GROUP) + g * SETS + tl.arange(0, SETS)
            # `pair >= 0` and `column >= 0` are always true: they give the masks their shape
            keep = ((entry * GROUP >= start) & (entry * GROUP < stop))[:, None] & (pair >= 0)[None, :]
            target = (both * param_rows + entry[:, None]) * (HEAD_DIM // 2) + pair[None, :]
            bits = tl.reshape(half_pair(scale0, scale1), (SETS, PAIRS))
            tl.store(scales.to(tl.pointer_type(tl.int32)) + target, bits, mask=keep)
            bits = tl.reshape(half_pair(base0, base1), (SETS, PAIRS))
            tl.store(bases.to(tl.pointer_type(tl.int32)) + target, bits, mask=keep)
        else:
            token = tile * 128 + g * WORD_ROWS + word_row
            column = part % ACROSS * (CHANNELS // GROUP) + tl.arange(0, CHANNELS // GROUP)
            keep = ((token >= start) & (token < stop))[:, None] & (column >= 0)[None, :]
            target = (both * param_rows + token[:, None]) * (HEAD_DIM // GROUP) + column[None, :]
            tl.store(scales + target, tl.reshape(scale0, (ROWS, CHANNELS // GROUP)).to(tl.float16), mask=keep)
            tl.store(bases + target, tl.reshape(base0, (ROWS, CHANNELS // GROUP)).to(tl.float16), mask=keep)
        for j in tl.static_range(JOINT):
            field = tl.reshape(values[g * JOINT + j], SHAPE)
            codes, fine = encode_pairs(
                field, scale0, scale1, base0, base1, r0, r1, part0, part1, KIND, LEVELS, HALF
            )  # fmt: skip
            if BITS == 8 and KIND != "hierarchical":
                codes = codes >> 4  # plain 8-bit codes are stored as two nibbles, too; `fine` holds the lower one
            if BITS == 3:
                lower |= (tl.reshape(codes, (ROWS, PAIRS)) & 0x10001) << ((g * JOINT + j) * WIDTH)
                codes = codes >> 1
            upper |= (tl.reshape(codes, (ROWS, PAIRS)) & FIELD) << ((g * JOINT + j) * WIDTH)
            if BITS == 8:
                lower |= (tl.reshape(fine, (ROWS, PAIRS)) & FIELD) << ((g * JOINT + j) * WIDTH)

    words = (both * tiles + tile) * (WORD_ROWS * HEAD_DIM)
    # if the append covers the tile, its present words need not be read
    whole = (tile * 128 >= start) & (tile * 128 + 128 <= stop)
    put_words(upper_words, upper, written, whole, words, word_row, pair, HEAD_DIM, WORD_ROWS, VALUE)
    if BITS == 8:
        put_words(lower_words, lower, written, whole, words, word_row, pair, HEAD_DIM, WORD_ROWS, VALUE)
    if BITS == 3:
        # fields of 1 bit: a word holds the lowest bits of two word rows, in turn
        put_words(
            lower_words, woven(lower), woven(lowest[:, None]).reshape(8), whole, words // 2, tl.arange(0, 8), pair,
            HEAD_DIM, 8, VALUE,
        )  # fmt: skip
    if tl.max(tl.max(tl.max(tl.where(odd == 0.0, 0, 1), 2), 1), 0) != 0:
        note(begin, index, record, row, head, tile, start, stop, first_row, tag, stride_token, word_row, pair,
             HEAD_DIM, FIELDS, WORD_ROWS, HALF, INDEXED)  # fmt: skip


@triton.jit
def note(
    begin, index, record, row, head, tile, start, stop, first_row, tag, stride_token, word_row, pair,
    HEAD_DIM: tl.constexpr, FIELDS: tl.constexpr, WORD_ROWS: tl.constexpr, HALF: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Store the location of the first NaN or Inf among a program's tokens, unless a location is already stored.

    A program calls this only if the smallest or the largest element of some group is not finite. Other arguments are
    those of :func:`pack_tiles`.

    Args:
        begin: pointer to the tokens of the program's row and head, as pairs of channels.
        row: row of the tokens that the program packs, counted from `first_row`.
        stop: one past the index of the last token that the launch packs.
        word_row: indices of the program's word rows within the tile.
        pair: indices of the program's pairs of channels.
    """
    first = 0x7FFFFFFF
    for f in range(FIELDS):
        token = tile * 128 + f * WORD_ROWS + word_row
        valid = (token >= start) & (token < stop)
        source = (token - start).to(tl.int64)
        if INDEXED:
            source = tl.load(index + source, mask=valid, other=0).to(tl.int64)
        x = tl.load(begin + source[:, None] * stride_token + pair[None, :], mask=valid[:, None] & (pair >= 0), other=0)
        low, high = low_half(x, HALF), high_half(x, HALF)
        channel = tl.where(low - low == 0.0, pair[None, :] * 2 + 1, pair[None, :] * 2)
        place = f * (WORD_ROWS * HEAD_DIM) + word_row[:, None] * HEAD_DIM + channel
        place = tl.where((low - low == 0.0) & (high - high == 0.0), 0x7FFFFFFF, place)
        first = tl.minimum(first, tl.min(tl.min(place, 1), 0))
    # nothing if it is in the next or the previous tile, with which a window's group is shared (`and` would run both)
    if first != 0x7FFFFFFF:  # noqa: SIM102
        # only the first program to find one records it, as the host reports a single place
        if tl.atomic_cas(record, 0, 1) == 0:
            tl.store(record + 1, tag)
            tl.store(record + 2, first_row + row)
            tl.store(record + 3, head)
            tl.store(record + 4, tile * 128 + first // HEAD_DIM)
            tl.store(record + 5, first % HEAD_DIM)
