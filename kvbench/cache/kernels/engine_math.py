"""The arithmetic of the formats of inference engines and of TurboQuant, in Triton.

Results equal those of :mod:`kvbench.quantizers.engine` and :mod:`kvbench.quantizers.turboquant` bit for bit.

All arithmetic is fp32. Casts to e4m3 use integers, because Triton's interpreter rounds them wrongly. Launches switch
fused multiply-adds off.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.quantizers.engine import amd, llamacpp

#: added to an fp32 value below 2**22, it leaves the value, rounded half to even, in the low bits
ROUND = tl.constexpr(12582912.0)
#: smallest scale of vLLM's formats per token and head
LEAST = tl.constexpr(9.999999974752427e-07)
#: 1 / 6 in fp32
SIXTH = tl.constexpr(0.1666666716337204)
INFINITY = tl.constexpr(float("inf"))
#: levels of iq4_nl and of octave, and the magnitude below which a block of iq4_nl is stored as zeros
IQ4_NL = tl.constexpr(tuple(map(float, llamacpp.IQ4_NL)))
OCTAVE_3, OCTAVE_4 = (tl.constexpr(tuple(map(float, amd.LEVELS[bits]))) for bits in (3, 4))
TINY = tl.constexpr(llamacpp.TINY)


@triton.jit
def exact_ratio(x, y):
    """Return x / y with correct rounding, for fp32 numbers x and a number y."""
    return tl.div_rn(x, tl.full(x.shape, y, tl.float32))


@triton.jit
def inverse(x):
    """Return 1 / x, or 0 where x is 0, in fp32."""
    safe = tl.where(x == 0.0, 1.0, x)
    return tl.where(x == 0.0, 0.0, tl.div_rn(safe * 0.0 + 1.0, safe))


@triton.jit
def half_away(x):
    """Return x (fp32, below 2**31) plus 0.5 with the sign of x, truncated to int32."""
    return (x + tl.where(x >= 0.0, 0.5, -0.5)).to(tl.int32)


@triton.jit
def to_e4m3(x):
    """Return the bytes of the e4m3 numbers nearest to x (ties to even, saturating), as int32.

    x is fp32 and finite.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    wide = size.to(tl.int32, bitcast=True)
    # e4m3 keeps 3 of 23 mantissa bits, and its exponents have a bias of 7 instead of 127
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6, numbers are multiples of 2**-9
    small = (size * 512.0 + ROUND).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0.015625, small, normal) | (((bits >> 31) & 1) << 7)


@triton.jit
def from_e4m3(code):
    """Return the non-negative e4m3 numbers, fp32, of bytes below 128."""
    normal = ((((code >> 3) + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def to_e2m1(x):
    """Return the 4-bit codes of the e2m1 numbers nearest to x (ties to the even code, saturating), as int32."""
    size = tl.abs(x)
    # `>` and `>=` in turn: at a tie the even code wins
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | (((x.to(tl.int32, bitcast=True) >> 31) & 1) << 3)


@triton.jit
def from_e2m1(code):
    """Return the e2m1 numbers of 4-bit codes, fp32."""
    place = code & 7
    small = place.to(tl.float32) * 0.5
    wide = (((place >> 1) + 126) << 23 | (place & 1) << 22).to(tl.float32, bitcast=True)
    size = tl.where(place < 2, small, wide)
    return tl.where(code >= 8, -size, size)


@triton.jit
def e2m1_of(x, scale, factor):
    """Return the e2m1 codes of groups with given scales; 0 where the scale is 0.

    Args:
        x: elements, fp32 ``[rows, groups, channels]``.
        scale: bytes of the e4m3 scales, ``[rows, groups, 1]``.
        factor: the one scale of all keys or values.
    """
    step = from_e4m3(scale) * factor
    return tl.where(step == 0.0, 0, to_e2m1(x * inverse(step)))


@triton.jit
def error_of(x, codes, scale, factor):
    """Return the squared error of groups, added up from the first channel to the last.

    Arguments are those of :func:`e2m1_of`, and the groups' codes.
    """
    rest = x - from_e2m1(codes) * from_e4m3(scale) * factor
    return in_order(rest * rest)


@triton.jit
def in_order(x):
    """Return the sums of groups, ``[rows, groups, 1]``, added up from the first channel to the last."""
    total = tl.sum(x, 2, keep_dims=True) * 0.0
    place = tl.arange(0, x.shape[2])[None, None, :]
    for i in tl.static_range(x.shape[2]):
        # one element of the sum is not 0, so it is exact
        total += tl.sum(tl.where(place == i, x, 0.0), 2, keep_dims=True)
    return total


@triton.jit
def peak_of(x, most):
    """Return the first of the elements of each group with the largest magnitude `most`, with its sign."""
    place = tl.arange(0, x.shape[2])[None, None, :]
    first = tl.min(tl.where(tl.abs(x) == most, place, x.shape[2]), 2, keep_dims=True)
    return tl.sum(tl.where(place == first, x, 0.0), 2, keep_dims=True)


@triton.jit
def encode_iq4_nl(x, most):
    """Compute codes and scales of groups, as :class:`kvbench.quantizers.engine.llamacpp.IQ4NL`.

    Args:
        x: elements, fp32 ``[rows, groups, 32]``.
        most: largest magnitudes of groups, ``[rows, groups, 1]``.
    """
    zero = most < TINY
    scaled = x * inverse(exact_ratio(peak_of(x, most), IQ4_NL[0]))
    # the levels on both sides of each element, and the code of the upper one
    lower, upper = tl.zeros(x.shape, tl.float32) + IQ4_NL[0], tl.zeros(x.shape, tl.float32) + IQ4_NL[1]
    codes = tl.zeros(x.shape, tl.int32) + 1
    for i in tl.static_range(1, 15):
        above = scaled >= IQ4_NL[i]
        lower, upper = tl.where(above, IQ4_NL[i], lower), tl.where(above, IQ4_NL[i + 1], upper)
        codes = tl.where(above, i + 1, codes)
    nearer = scaled - lower < upper - scaled
    level, weight = tl.where(nearer, lower, upper), x * x
    codes = codes - nearer.to(tl.int32)
    top, below = in_order(weight * level * x), in_order(weight * level * level)
    some = (zero == 0) & (below > 0.0)
    param = tl.where(some, tl.div_rn(top, tl.where(below > 0.0, below, 1.0)), 0.0)
    return tl.where(zero, 0, codes), param


@triton.jit
def encode_engine(x, here, factor, RULE: tl.constexpr):
    """Compute the codes and the parameter of groups of channels.

    Args:
        x: elements, fp32 ``[rows, groups, channels]``; 0 where `here` is False.
        here: mask of the elements that exist, which broadcasts over `x`.
        factor: the one scale of all keys or values of a layer, for the rules that have one.
        RULE: name of the rule (:data:`kvbench.cache.kernels.engine.KINDS`).

    Returns:
        The codes, int32 in the shape of `x`, and the parameter of each group, ``[rows, groups, 1]``: fp32 for rules per
        token and head, else fp32 to be rounded to fp16, or int32 to be stored as a byte.
    """
    most = tl.max(tl.abs(x), 2, keep_dims=True)
    if RULE == "int8":
        param = tl.maximum(exact_ratio(most, 127.0), LEAST)
        codes = tl.minimum(tl.maximum(half_away(x * inverse(param)), -128), 127) + 128
    elif RULE == "fp8_head":
        param = tl.maximum(exact_ratio(most, 448.0), LEAST)
        codes = to_e4m3(x * inverse(param))
    elif RULE == "fp8":
        param = most
        codes = to_e4m3(exact_ratio(x, factor))
    elif RULE == "int4":
        low = tl.min(tl.where(here, x, INFINITY), 2, keep_dims=True)
        high = tl.max(tl.where(here, x, -INFINITY), 2, keep_dims=True)
        scale = tl.maximum(exact_ratio(high - low, 15.0), LEAST)
        # bounded before it becomes an integer, as a quotient may pass the range of int32
        zero = half_away(tl.minimum(tl.maximum(tl.div_rn(-low, scale), -1.0), 16.0))
        zero = tl.minimum(tl.maximum(zero, 0), 15)
        places = x * inverse(scale) + zero.to(tl.float32)
        codes = half_away(tl.minimum(tl.maximum(places, -1.0), 16.0))
        codes = tl.minimum(tl.maximum(codes, 0), 15)
        # the zero point takes the lowest 4 bits of the scale, as in vLLM
        param = ((scale.to(tl.int32, bitcast=True) & -16) | zero).to(tl.float32, bitcast=True)
    elif RULE == "q8_0":
        param = exact_ratio(most, 127.0)
        places = x * inverse(param)
        # C's roundf: away from 0 at a tie; adding 0.5 before the fraction is cut off would round 0.49999997 up
        whole = places.to(tl.int32)
        rest = places - whole.to(tl.float32)
        codes = whole + (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)
        codes = tl.minimum(tl.maximum(codes, -128), 127) + 128
    elif RULE == "q8_0_cpu":
        param = exact_ratio(most, 127.0)
        steps = tl.div_rn(tl.full(most.shape, 127.0, tl.float32), tl.where(most == 0.0, 1.0, most))
        codes = ((x * steps + ROUND).to(tl.int32, bitcast=True) & 0xFF) ^ 0x80
    elif RULE == "q4_0":
        param = exact_ratio(peak_of(x, most), -8.0)
        codes = tl.minimum(tl.maximum((x * inverse(param) + 8.5).to(tl.int32), 0), 15)
    elif RULE == "iq4_nl":
        codes, param = encode_iq4_nl(x, most)
    else:  # nvfp4, 4over6
        wanted = exact_ratio(most * SIXTH, factor)
        param = to_e4m3(wanted)
        codes = e2m1_of(x, param, factor)
        if RULE == "4over6":
            other = to_e4m3(wanted * 1.5)
            rival = e2m1_of(x, other, factor)
            better = error_of(x, rival, other, factor) < error_of(x, codes, param, factor)
            param, codes = tl.where(better, other, param), tl.where(better, rival, codes)
    return codes, param


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
def encode_octave(x, BITS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Compute codes, int32 in the shape of `x`, and scales, fp32 ``[ROWS]``, of blocks of octave.

    Args:
        x: blocks, fp32 ``[ROWS, SIZE]``, of which the first COUNT channels exist; the others are 0.
    """
    LEVELS: tl.constexpr = OCTAVE_3 if BITS == 3 else OCTAVE_4
    squares = ordered_sum(x * x, ROWS, SIZE)
    root = tl.maximum(tl.sqrt_rn(exact_ratio(squares, COUNT * 1.0)), 1e-12)
    scaled = tl.div_rn(x, tl.broadcast_to(root[:, None], (ROWS, SIZE))) * (59.0 if BITS == 3 else 46.0)
    codes = tl.zeros((ROWS, SIZE), tl.int32)
    level = tl.zeros((ROWS, SIZE), tl.float32) + LEVELS[0]
    for i in tl.static_range(1, 2**BITS):
        above = scaled > (LEVELS[i - 1] + LEVELS[i]) / 2  # the lower level at a tie
        codes += above.to(tl.int32)
        level = tl.where(above, LEVELS[i], level)
    product = ordered_sum(x * level, ROWS, SIZE)
    scale = tl.where(product > 0.0, tl.div_rn(squares, tl.maximum(product, 1e-30)), 0.0) * 64.0
    return codes, scale


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
