"""Triton kernel of :mod:`kvbench.cache.kernels.append`; each program copies one token's key or value of one head."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_token(source, target, CHANNELS: tl.constexpr):
    """Copy all channels of one token of one head. CHANNELS need not be a power of two."""
    # ranges are powers of two in Triton; heads need not be
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, BLOCK)
    tl.store(target + channel, tl.load(source + channel, mask=channel < CHANNELS), mask=channel < CHANNELS)


@triton.jit
def write_new_tokens(
    keys, values, key_buffer, value_buffer, places,
    key_row, key_head, key_token, value_row, value_head, value_token,
    heads, key_room, value_room, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of new tokens into a layer's buffers (:func:`kvbench.cache.kernels.append.append`).

    Grid: (B x H, new tokens, 2). Programs with 0 in the last dimension write keys, those with 1 write values. Channels
    are contiguous; the strides of `keys` and `values` over rows, heads and tokens are in elements. `key_room` and
    `value_room` are the numbers of tokens per head for which the buffers have room.
    """
    line, token, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = line // heads, line % heads
    # read from device memory, as a captured step is replayed with the arguments of its capture
    place = (tl.load(places + 2 * row + side) + token).to(tl.int64)
    if side == 0:
        source = keys + row.to(tl.int64) * key_row + head * key_head + token * key_token
        copy_token(source, key_buffer + (line.to(tl.int64) * key_room + place) * KEY_DIM, KEY_DIM)
    else:
        source = values + row.to(tl.int64) * value_row + head * value_head + token * value_token
        copy_token(source, value_buffer + (line.to(tl.int64) * value_room + place) * VALUE_DIM, VALUE_DIM)
