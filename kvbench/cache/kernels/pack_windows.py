"""Triton kernel that quantizes and packs windows whose groups do not fit tiles (LogQuant's W of 42 tokens).

An append consists of whole windows, so their groups may cross the borders of fields and of tiles, and two windows may
share words. Each program handles one tile, so that no word has two writers. It processes the groups that overlap its
tile one after another: it reads the whole group, even the part in another tile, finds its extremes, and writes the
codes of the group's tokens in its own tile. A group that crosses a border is thus processed by the programs of both
tiles, which share nothing; its parameters are written only by the program of the tile that has its first token.

The arithmetic is that of :mod:`kvbench.cache.kernels.pack_math`; codes and parameters equal those of
:class:`kvbench.quantizers.windowed.WindowedQuantizer` bit for bit.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.cache.kernels.pack_kernel import encode_pairs, group_params, note, put_words
from kvbench.cache.kernels.pack_math import half_pair, high_half, larger, largest, low_half, smaller, smallest

#: number of tokens that are processed at once: the word rows of a tile of 2-bit codes, so they are in one field
RUN = tl.constexpr(16)


@triton.jit
def group_holding(token, WINDOW: tl.constexpr, GROUP: tl.constexpr):
    """Return the index, within the segment, of the group to which a token belongs, a scalar or a vector.

    A window of WINDOW tokens (LogQuant's W) is divided into as few groups as GROUP, their largest size, allows.
    """
    # the first LONGER groups of a window have LEAST + 1 tokens, the others LEAST
    GROUPS: tl.constexpr = (WINDOW + GROUP - 1) // GROUP
    LEAST: tl.constexpr = WINDOW // GROUPS
    LONGER: tl.constexpr = WINDOW % GROUPS
    inside = token % WINDOW
    behind = inside - LONGER * (LEAST + 1)
    return token // WINDOW * GROUPS + tl.where(behind < 0, inside // (LEAST + 1), LONGER + behind // LEAST)


@triton.jit
def first_token(group, WINDOW: tl.constexpr, GROUP: tl.constexpr):
    """Return the index, within the segment, of the first token of a group, a scalar or a vector.

    If a window cannot be divided evenly, its first groups have one token more than the others. WINDOW and GROUP are as
    for :func:`group_holding`.
    """
    GROUPS: tl.constexpr = (WINDOW + GROUP - 1) // GROUP
    inside = group % GROUPS
    return group // GROUPS * WINDOW + inside * (WINDOW // GROUPS) + tl.minimum(inside, WINDOW % GROUPS)


# Not specialized: arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "param_rows", "tag"])
def pack_windows(
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
    BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Quantize whole windows of tokens and write their codes and parameters into a segment.

    Grid: (rows x H, programs). Each program writes the codes of one tile in CHANNELS channels. The arguments are those
    of :func:`kvbench.cache.kernels.pack_kernel.pack_tiles`, with groups of tokens and codes of 2, 4 or 8 bits, and:

    Args:
        start: index, within the segment, of the first token to write, with which a window must begin.
        count: number of tokens to write: those of some whole windows.
        WINDOW: number of tokens in a window (LogQuant's W), which is divided into groups.
        GROUP: largest number of tokens in a group; a window is divided into as few groups as this allows.
    """
    WIDTH: tl.constexpr = 2 if BITS == 2 else 4
    FIELDS: tl.constexpr = 16 // WIDTH
    WORD_ROWS: tl.constexpr = 128 // FIELDS
    PAIRS: tl.constexpr = CHANNELS // 2
    PARTS: tl.constexpr = HEAD_DIM // CHANNELS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    FIELD: tl.constexpr = ((1 << WIDTH) - 1) * 0x10001
    # number of runs in a field, and maximum number of runs that a group overlaps
    SPLIT: tl.constexpr = WORD_ROWS // RUN
    RUNS: tl.constexpr = (GROUP - 2) // RUN + 2

    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    part = tl.program_id(1) + first_part
    tile, part = start // 128 + part // PARTS, part % PARTS
    pair = part * PAIRS + tl.arange(0, PAIRS)
    begin = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    both = (first_row + row).to(tl.int64) * heads + head
    stop = start + count

    # accumulators of the words, one for each run of a field; upper1 and lower1 are unused if a field has one run
    upper0 = tl.zeros((RUN, PAIRS), tl.int32)
    upper1, lower0, lower1 = upper0, upper0, upper0
    odd = tl.zeros((1, PAIRS), tl.float32)
    begins, ends = tl.maximum(tile * 128, start), tl.minimum(tile * 128 + 128, stop)
    # the groups that overlap this tile; the first may begin in the tile before
    group = group_holding(begins, WINDOW, GROUP)
    last = tl.where(ends > begins, group_holding(tl.maximum(ends - 1, 0), WINDOW, GROUP) + 1, group)
    for number in range(group, last):
        front, behind = first_token(number, WINDOW, GROUP), first_token(number + 1, WINDOW, GROUP)
        run = front // RUN
        # all loads are issued before the first use; beyond the group's ends its first or last token is repeated
        values = ()
        for j in tl.static_range(RUNS):
            token = (run + j) * RUN + tl.arange(0, RUN)
            source = (tl.minimum(tl.maximum(token, front), behind - 1) - start).to(tl.int64)
            if INDEXED:
                source = tl.load(index + source).to(tl.int64)
            values = values + (tl.load(begin + source[:, None] * stride_token + pair[None, :]),)
        least = values[0]
        most = least
        for j in tl.static_range(1, RUNS):
            least, most = smaller(least, values[j], HALF), larger(most, values[j], HALF)
        least, most = smallest(least, 0, HALF), largest(most, 0, HALF)
        low0, low1 = low_half(least, HALF), high_half(least, HALF)
        high0, high1 = low_half(most, HALF), high_half(most, HALF)
        # NaN and Inf appear in an extreme of their group, for which x - x is NaN, otherwise 0
        odd += (low0 - low0) + (low1 - low1) + (high0 - high0) + (high1 - high1)
        # + 0 turns -0 into 0, as in the quantizers
        scale0, base0, r0, part0 = group_params(low0 + 0.0, high0 + 0.0, "affine", LEVELS, HALF)
        scale1, base1, r1, part1 = group_params(low1 + 0.0, high1 + 0.0, "affine", LEVELS, HALF)
        if front >= tile * 128:  # only the tile of the group's first token writes its parameters
            target = (both * param_rows + number) * (HEAD_DIM // 2) + pair[None, :]
            tl.store(scales.to(tl.pointer_type(tl.int32)) + target, half_pair(scale0, scale1))
            tl.store(bases.to(tl.pointer_type(tl.int32)) + target, half_pair(base0, base1))
        for j in tl.static_range(RUNS):
            at = run + j
            # a run is in one field of one tile; runs in a neighbouring tile are left to that tile's program
            if (at // (128 // RUN) == tile) & (at * RUN < behind):
                token = at * RUN + tl.arange(0, RUN)
                mine = ((token >= front) & (token < behind))[:, None]
                codes, fine = encode_pairs(
                    values[j], scale0, scale1, base0, base1, r0, r1, part0, part1, "affine", LEVELS, HALF
                )  # fmt: skip
                # the run's field, and its number within the field if a field has two runs
                place = at % (128 // RUN)
                shift = place // SPLIT * WIDTH
                if BITS == 8:
                    codes = codes >> 4
                    fine = tl.where(mine, fine & FIELD, 0) << shift
                codes = tl.where(mine, codes & FIELD, 0) << shift
                if SPLIT == 1:
                    upper0 |= codes
                else:
                    second = place % SPLIT == 1
                    upper0 |= tl.where(second, 0, codes)
                    upper1 |= tl.where(second, codes, 0)
                    if BITS == 8:
                        lower0 |= tl.where(second, 0, fine)
                        lower1 |= tl.where(second, fine, 0)

    words = (both * tiles + tile) * (WORD_ROWS * HEAD_DIM)
    whole = (tile * 128 >= start) & (tile * 128 + 128 <= stop)
    for half in tl.static_range(SPLIT):
        word_row = half * RUN + tl.arange(0, RUN)
        written = tl.zeros((RUN,), tl.int32)
        for f in tl.static_range(FIELDS):
            token = tile * 128 + f * WORD_ROWS + word_row
            written |= tl.where((token >= start) & (token < stop), (FIELD & 0xFFFF) << (f * WIDTH), 0)
        put_words(
            upper_words,
            upper0 if half == 0 else upper1,
            written,
            whole,
            words,
            word_row,
            pair,
            HEAD_DIM,
            WORD_ROWS,
            VALUE,
        )
        if BITS == 8:
            put_words(
                lower_words,
                lower0 if half == 0 else lower1,
                written,
                whole,
                words,
                word_row,
                pair,
                HEAD_DIM,
                WORD_ROWS,
                VALUE,
            )
    if tl.max(tl.max(tl.where(odd == 0.0, 0, 1), 1), 0) != 0:
        note(begin, index, record, row, head, tile, start, stop, first_row, tag, stride_token,
             tl.arange(0, WORD_ROWS), pair, HEAD_DIM, FIELDS, WORD_ROWS, HALF, INDEXED)  # fmt: skip
