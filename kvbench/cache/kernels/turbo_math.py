"""The arithmetic of TurboQuant's quantizers in Triton, equal bit for bit to :mod:`kvbench.quantizers.turboquant`.

All of it is fp32. Launches switch fused multiply-adds off.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def halved(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Add the second half of each row of numbers ``[ROWS, SIZE]`` to the first."""
    return tl.sum(tl.reshape(x, (ROWS, 2, SIZE // 2)), 1)


@triton.jit
def ordered_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the sums of rows, added in the order of :func:`kvbench.quantizers.turboquant.ordered_sum`.

    The numbers are fp32 ``[ROWS, SIZE]``; SIZE is a power of two from 2 to 256.
    """
    if SIZE > 128:
        x = halved(x, ROWS, 256)
    if SIZE > 64:
        x = halved(x, ROWS, 128)
    if SIZE > 32:
        x = halved(x, ROWS, 64)
    if SIZE > 16:
        x = halved(x, ROWS, 32)
    if SIZE > 8:
        x = halved(x, ROWS, 16)
    if SIZE > 4:
        x = halved(x, ROWS, 8)
    if SIZE > 2:
        x = halved(x, ROWS, 4)
    return tl.sum(x, 1)


@triton.jit
def encode_key(
    x, there, RULE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TABLE: tl.constexpr
):
    """Compute codes, int32 ``[ROWS, CHANNELS]``, and norms, fp32 ``[ROWS]``, of rotated keys.

    Args:
        x: keys, fp32 ``[ROWS, CHANNELS]``; 0 where `there` is False.
        there: mask of the channels that exist, ``[CHANNELS]``.
        RULE: ``levels``, or ``levels_write`` to divide the norm by the length of the levels.
        BITS: bits of a code, 3 or 4.
        CHANNELS: number of channels, rounded up to a power of two.
        TABLE: midpoints between levels, then the levels, in ascending order.
    """
    norm = tl.sqrt_rn(ordered_sum(x * x, ROWS, CHANNELS))
    y = tl.div_rn(x, tl.broadcast_to((norm + 1e-8)[:, None], (ROWS, CHANNELS)))
    order = tl.zeros((ROWS, CHANNELS), tl.int32)
    for i in tl.static_range(2**BITS - 1):
        order += (y >= TABLE[i]).to(tl.int32)
    if RULE == "levels_write":
        z = tl.zeros((ROWS, CHANNELS), tl.float32)
        for i in tl.static_range(2**BITS):
            z = tl.where((order == i) & there[None, :], TABLE[2**BITS - 1 + i], z)
        norm = tl.div_rn(norm, tl.sqrt_rn(ordered_sum(z * z, ROWS, CHANNELS) + 1e-16))
    codes = order
    if BITS == 4:
        # a sign, 1 for negative levels, and the index of the level's magnitude
        codes = tl.where(order < 8, 15 - order, order - 8)
    return codes, norm


@triton.jit
def encode_value(x, there, BITS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute codes, int32 ``[ROWS, CHANNELS]``, and scales and minima, fp32 ``[ROWS]``, of values.

    The values are fp32 ``[ROWS, CHANNELS]``, of which the channels `there` exist.
    """
    low = tl.min(tl.where(there[None, :], x, INFINITY), 1) + 0.0
    high = tl.max(tl.where(there[None, :], x, -INFINITY), 1) + 0.0
    scale = tl.maximum(tl.div_rn(high - low, tl.full((ROWS,), 2**BITS - 1, tl.float32)), 1e-8)
    places = tl.div_rn(x - low[:, None], tl.broadcast_to(scale[:, None], (ROWS, CHANNELS))) + 0.5
    codes = tl.minimum(tl.maximum(places, 0.0), 2.0**BITS - 1.0).to(tl.int32)
    return codes, scale, low
