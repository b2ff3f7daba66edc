"""Triton kernel of :mod:`kvbench.cache.kernels.append`; each program copies one token's key or value of one head."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_token(source, target, CHANNELS: tl.constexpr):
    """Copy all channels of one token of one head.

    Args:
        source: pointer to the first channel to read.
        target: pointer to the first channel to write.
        CHANNELS: number of channels; need not be a power of two.
    """
    # ranges are powers of two in Triton; heads need not be
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, BLOCK)
    tl.store(target + channel, tl.load(source + channel, mask=channel < CHANNELS), mask=channel < CHANNELS)


@triton.jit
def write(
    keys, values, key_buffer, value_buffer, places,
    key_row, key_head, key_token, value_row, value_head, value_token,
    heads, key_room, value_room, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of new tokens into a layer's buffers.

    Grid: (B x H, new tokens, 2). Programs with 0 in the last dimension write keys, those with 1 write values.

    Args:
        keys: pointer to the keys of the new tokens, ``[B, H, q, D]``, channels contiguous.
        values: pointer to the values of the new tokens, ``[B, H, q, Dv]``, channels contiguous.
        key_buffer: pointer to the buffer that receives the keys, ``[B, H, key_room, D]``.
        value_buffer: pointer to the buffer that receives the values, ``[B, H, value_room, Dv]``.
        places: pointer to int32 ``[B, 2]``: for each row, the index along `key_room` of its first new key, and that
            along `value_room` of its first new value.
        key_row: stride of `keys` over rows, in elements.
        key_head: stride of `keys` over heads, in elements.
        key_token: stride of `keys` over tokens, in elements.
        value_row: stride of `values` over rows, in elements.
        value_head: stride of `values` over heads, in elements.
        value_token: stride of `values` over tokens, in elements.
        heads: number of KV heads, H.
        key_room: number of tokens per head for which `key_buffer` has room.
        value_room: number of tokens per head for which `value_buffer` has room.
        KEY_DIM: channels of a key, D.
        VALUE_DIM: channels of a value, Dv.
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
