"""Kernel of :mod:`kvbench.cache.kernels.append` (Triton): a program copies one token's key, or value, of one head."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_token(source, target, D: tl.constexpr):
    """Copy `D` channels."""
    BLOCK: tl.constexpr = triton.next_power_of_2(D)
    channel = tl.arange(0, BLOCK)
    tl.store(target + channel, tl.load(source + channel, mask=channel < D), mask=channel < D)


@triton.jit
def write(
    keys, values, key_buffer, value_buffer, places,
    key_row, key_head, key_token, value_row, value_head, value_token,
    heads, key_room, value_room, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Grid: (B x H, q, 2)."""
    line, token, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = line // heads, line % heads
    place = (tl.load(places + 2 * row + side) + token).to(tl.int64)
    if side == 0:
        source = keys + row.to(tl.int64) * key_row + head * key_head + token * key_token
        copy_token(source, key_buffer + (line.to(tl.int64) * key_room + place) * K, K)
    else:
        source = values + row.to(tl.int64) * value_row + head * value_head + token * value_token
        copy_token(source, value_buffer + (line.to(tl.int64) * value_room + place) * V, V)
