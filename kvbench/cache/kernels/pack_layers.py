"""Triton kernel that packs segments of one shape in many layers in a single launch, given a table of addresses.

At each decode step, every layer has one more value that is no longer in the full-precision window and must be packed. A
single launch for all layers takes about as long as a launch for one layer.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.cache.kernels.pack_kernel import pack_tiles
from kvbench.cache.kernels.pack_windows import pack_windows


@triton.jit(do_not_specialize=["start", "count", "first_row", "first_part", "tiles", "param_rows"])
def pack_layers(
    table, like, record, offset, stride_row, stride_head, stride_token,
    start, count, first_row, first_part, heads, tiles, param_rows,
    KIND: tl.constexpr, BITS: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Quantize and pack tokens of several layers in one launch, given a table of the layers' buffer addresses.

    Each layer is packed as by :func:`pack_tiles`, or by :func:`pack_windows` if `WINDOW` is not 0; the other arguments
    are theirs. Only addresses and tags differ between layers; all other arguments hold for every layer. Grid: (rows x
    H, programs, layers).

    Args:
        table: pointer to int64 ``[layers, 6]``. The first five columns are addresses: of the storage of the tokens, the
            words of codes (8 bits: of upper nibbles), the words of lower nibbles, the scales, and the minima or zero
            points. The last column is the segment's tag.
        like: any tensor with the dtype of the tokens, which an address alone does not determine.
        offset: offset of the first token in its storage, in elements.
        WINDOW: if groups may cross tile boundaries (LogQuant), the number of tokens per block that is divided into
            groups; else 0.
    """
    # allocators align buffers to 16 bytes; without this hint, loads through an address are not vectorized
    entry = table + tl.program_id(2) * 6
    x = tl.multiple_of(tl.load(entry).to(tl.pointer_type(like.dtype.element_ty)), 16) + offset
    upper_words = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int16)), 16)
    lower_words = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.int16)), 16)
    scales = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float16)), 16)
    bases = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(tl.float16)), 16)
    tag = tl.load(entry + 5).to(tl.int32)
    if WINDOW:
        pack_windows(
            x, x, upper_words, lower_words, scales, bases, record, stride_row, stride_head, stride_token, start, count,
            first_row, first_part, heads, tiles, param_rows, tag,
            BITS, WINDOW, GROUP, HEAD_DIM, VALUE, CHANNELS, False,
        )  # fmt: skip
    else:
        pack_tiles(
            x, x, upper_words, lower_words, scales, bases, record, stride_row, stride_head, stride_token, start, count,
            first_row, first_part, heads, tiles, param_rows, tag,
            KIND, BITS, BY_CHANNEL, GROUP, HEAD_DIM, VALUE, ROWS, CHANNELS, False,
        )  # fmt: skip
