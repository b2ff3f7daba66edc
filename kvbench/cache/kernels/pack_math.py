"""The quantizers' arithmetic on pairs of elements (Triton).

A *pair* is an int32 that holds two neighbouring channels in fp16 (HALF) or bf16, the lower channel in the low half.
fp16 pairs are processed packed (one instruction for two elements), bf16 ones in fp32. ``fl(x)`` is x rounded to fp32.
LEVELS is the largest code; `low` and `high` are the extremes of each group, in fp32. Codes and parameters equal, bit
for bit, those of ``encode_groups`` in :mod:`kvbench.quantizers` for the same dtype:

* For fp16 input every operation is rounded to fp16; for bf16 input all arithmetic is in fp32. The compiler's fused
  multiply-adds are switched off at the launch; those in the code are exact.
* To round half to even, a constant is added: ``q + 1.5 * 2**23`` (fp16: ``q + 1024``) has the integer in its low bits.
* A division by a scale s is a multiplication by r = fl(1 / s). For fp16 operands o and s this gives the same fp16
  quotient: as both have significands of 11 bits, o / s differs by more than 2**-23 (relative) from every rounding
  boundary, and fl(o * r) is closer to o / s than that. For fp32 it is followed by a Newton step on the exact remainder
  (Markstein, 1990), which gives the correct quotient wherever the code depends on its rounding.

Inline PTX does not run in Triton's interpreter, so each function that uses it has a twin in plain Triton operations.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

#: True in Triton's interpreter (numpy on the CPU), which has no inline PTX and no fused multiply-add
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

FP16_MAX = tl.constexpr(65504.0)
#: added to an fp32 value, it leaves the value, rounded half to even, in the low bits
ROUND32 = tl.constexpr(12582912.0)
INFINITY = tl.constexpr(float("inf"))


# -- pairs ----------------------------------------------------------------------------------------------------------


@triton.jit
def low_half(pair, HALF: tl.constexpr):
    """Return the lower channel of pairs, the low 16 bits of each int32, as fp32."""
    if HALF:
        x = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = (pair << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def high_half(pair, HALF: tl.constexpr):
    """Return the upper channel of pairs, the high 16 bits of each int32, as fp32."""
    if HALF:
        x = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = (pair & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def half_pair(low, high):
    """Round two fp32 values to fp16 and return them as a pair in one int32."""
    bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def bit_pair(low, high):
    """Return the low 16 bits of two int32 values as a pair in one int32."""
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _max_f16(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _min_f16(a, b):
    return tl.inline_asm_elementwise("min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _max_bf16(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _min_bf16(a, b):
    return tl.inline_asm_elementwise("min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _raw_pair(low, high, HALF: tl.constexpr):
    """Join two fp32 values that the dtype represents exactly into a pair; the inverse of `low_half` and `high_half`."""
    if HALF:
        pair = half_pair(low, high)
    else:
        pair = bit_pair(low.to(tl.int32, bitcast=True) >> 16, high.to(tl.int32, bitcast=True) >> 16)
    return pair


@triton.jit
def smaller(a, b, HALF: tl.constexpr):
    """Return the elementwise minimum of two blocks of pairs; NaN where either is NaN."""
    if INTERPRETED:
        low = tl.minimum(low_half(a, HALF), low_half(b, HALF), propagate_nan=tl.PropagateNan.ALL)
        high = tl.minimum(high_half(a, HALF), high_half(b, HALF), propagate_nan=tl.PropagateNan.ALL)
        least = _raw_pair(low, high, HALF)
    elif HALF:
        least = _min_f16(a, b)
    else:
        least = _min_bf16(a, b)
    return least


@triton.jit
def larger(a, b, HALF: tl.constexpr):
    """Return the elementwise maximum of two blocks of pairs; NaN where either is NaN."""
    if INTERPRETED:
        low = tl.maximum(low_half(a, HALF), low_half(b, HALF), propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high_half(a, HALF), high_half(b, HALF), propagate_nan=tl.PropagateNan.ALL)
        most = _raw_pair(low, high, HALF)
    elif HALF:
        most = _max_f16(a, b)
    else:
        most = _max_bf16(a, b)
    return most


@triton.jit
def smallest(pairs, AXIS: tl.constexpr, HALF: tl.constexpr):
    """Return the minimum of pairs over one dimension, separately for lower and upper channels.

    The result has size 1 in the dimension AXIS.
    """
    if INTERPRETED:
        low, high = low_half(pairs, HALF), high_half(pairs, HALF)
        # the interpreter's minimum skips NaN; the sum is 0, or NaN if any element is NaN or Inf
        low = tl.min(low, AXIS, keep_dims=True) + tl.sum(low * 0.0, AXIS, keep_dims=True)
        high = tl.min(high, AXIS, keep_dims=True) + tl.sum(high * 0.0, AXIS, keep_dims=True)
        least = _raw_pair(low, high, HALF)
    elif HALF:
        least = tl.reduce(pairs, AXIS, _min_f16, keep_dims=True)
    else:
        least = tl.reduce(pairs, AXIS, _min_bf16, keep_dims=True)
    return least


@triton.jit
def largest(pairs, AXIS: tl.constexpr, HALF: tl.constexpr):
    """Return the maximum of pairs over one dimension, as :func:`smallest` does the minimum."""
    if INTERPRETED:  # may skip NaN, which is then in the result of `smallest`
        low = tl.max(low_half(pairs, HALF), AXIS, keep_dims=True)
        most = _raw_pair(low, tl.max(high_half(pairs, HALF), AXIS, keep_dims=True), HALF)
    elif HALF:
        most = tl.reduce(pairs, AXIS, _max_f16, keep_dims=True)
    else:
        most = tl.reduce(pairs, AXIS, _max_bf16, keep_dims=True)
    return most


# -- parameters of a group (from fp32 extremes; in fp32, but exact in fp16) --------------------------------------------


@triton.jit
def quotient(a, b, r):
    """Return a / b in fp32, or 0 if b = 0, computed without a division from r = fl(1 / b) (:func:`reciprocal`).

    The quotient may differ in its last bit from the correctly rounded one, but only where the caller's next rounding,
    to fp16 or to a code, gives the same result for both.
    """
    if INTERPRETED:
        q = tl.where(b == 0.0, 0.0, tl.div_rn(a, tl.broadcast_to(tl.where(b == 0.0, 1.0, b), a.shape)))
    else:
        b, r = tl.broadcast_to(b, a.shape), tl.broadcast_to(r, a.shape)
        # Markstein: the remainder of a rounded quotient is exact in fp32, and one fma with it corrects the quotient
        q = a * r
        q = tl.fma(tl.fma(-q, b, a), r, q)
    return q


@triton.jit
def divided(x, by: tl.constexpr):
    """Return x / by for a constant divisor, rounded to fp32."""
    return quotient(x, tl.full(x.shape, by, tl.float32), tl.full(x.shape, 1.0 / by, tl.float32))


@triton.jit
def reciprocal(x):
    """Return 1 / x rounded to fp32, or 0 if x = 0.

    A group of equal elements has the scale 0. As its reciprocal is taken to be 0 too, all codes of the group are 0.
    """
    if INTERPRETED:
        r = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.where(x == 0.0, 1.0, x))
    else:
        r = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.where(x == 0.0, 0.0, r)


@triton.jit
def to_half(x):
    """Round fp32 values to fp16, and return them as fp32."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def affine_params(low, high, LEVELS: tl.constexpr, HALF: tl.constexpr):
    """Compute the scale and the minimum of each group, bit for bit as :class:`kvbench.quantizers.AffineQuantizer`.

    Both are fp32 but representable in fp16.
    """
    if HALF:
        # a range above 65504 is computed at a quarter, and the scale multiplied by 4; both are exact
        base = low
        part = tl.where(to_half(high - low) == INFINITY, 0.25, 1.0)
        scale = to_half(to_half(high * part - low * part) * (1.0 / LEVELS)) * tl.where(part == 1.0, 1.0, 4.0)
    else:
        # bf16 has a wider range than fp16, in which parameters are stored: both are limited to that of fp16
        base = to_half(tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX))
        scale = to_half(tl.minimum(tl.maximum(divided(high - base, LEVELS), 0.0), FP16_MAX))
    return scale, base


@triton.jit
def share(scale, base, high, LEVELS: tl.constexpr):
    """Return 1 or 1/4 for each group: the factor that keeps the computation of its codes in fp16 from overflowing.

    The group's elements, minimum (`base`) and scale are all to be multiplied by the factor. It is 1/4 if an element's
    difference from the minimum, or the scale times the largest code, exceeds 65504, the largest fp16 number.
    """
    wide = (to_half(high - base) == INFINITY) | (to_half(scale * LEVELS) == INFINITY)
    return tl.where(wide, 0.25, 1.0)


@triton.jit
def atom_params(low, high, LEVELS: tl.constexpr, HALF: tl.constexpr):
    """Compute the scale and the zero point of each group, bit for bit as :class:`kvbench.quantizers.AtomQuantizer`.

    Both are fp32 but representable in fp16.
    """
    # bounded, as an infinite quotient would spoil the Newton step; the scale is limited to 65504 anyway
    scale = divided(tl.minimum(tl.maximum(high - low, 1e-5), 3e38), LEVELS)
    if HALF:
        # 1e-5 in fp16; the product is rounded to fp16 as the quantizer does, unless the range overflows
        near = to_half(tl.maximum(to_half(high - low), 1.0013580322265625e-05) * (1.0 / LEVELS))
        scale = tl.where(near == INFINITY, scale, near)
    scale = to_half(tl.minimum(tl.maximum(scale, 5.9604644775390625e-08), FP16_MAX))  # 2**-24, the least of fp16
    zero = tl.div_rn(-low, scale)  # once per group, so a true division costs little
    if HALF:
        zero = to_half(zero)
    zero = (tl.minimum(tl.maximum(zero, 0.0), LEVELS) + ROUND32) - ROUND32
    return scale, zero


# -- codes of a pair -------------------------------------------------------------------------------------------------


@triton.jit
def bounded(q, least: tl.constexpr, most: tl.constexpr):
    """Clamp quotients to a range; NaN becomes the lower bound.

    :func:`quotient` can return NaN if the true value is too small for fp32.
    """
    return tl.minimum(tl.maximum(q, least), most)


@triton.jit
def affine32(x, scale, base, r, LEVELS: tl.constexpr):
    """Return the affine codes of bf16 elements that were converted to fp32, with fp32 arithmetic.

    `scale`, `base` (the minimum) and `r` (fl(1 / scale)) are those of each element's group.

    Returns:
        The codes in the low bits of an int32 whose other bits are not zero, and the codes as fp32 numbers.
    """
    rounded = bounded(quotient(x - base, scale, r), 0.0, LEVELS) + ROUND32
    return rounded.to(tl.int32, bitcast=True), rounded - ROUND32


@triton.jit
def lower32(x, number, scale, base, r):
    """Return the lower nibbles of the hierarchical codes of bf16 elements, with fp32 arithmetic.

    A lower nibble encodes the difference between the element and its decoded upper nibble, in sixteenths of the scale.
    It is in the low bits of an int32 whose other bits are not zero. `number` is the upper nibble as an fp32 number;
    other arguments are those of :func:`affine32`.
    """
    rest = x - (number * scale + base)  # the product is exact
    rounded = bounded(quotient(rest, scale * 0.0625, r * 16.0), -8.0, 7.0) + ROUND32
    return rounded.to(tl.int32, bitcast=True) + 8


@triton.jit
def atom32(x, scale, zero, r, LEVELS: tl.constexpr):
    """Return the codes of Atom's quantizer for bf16 elements that were converted to fp32, with fp32 arithmetic.

    The codes are in the low bits of an int32 whose other bits are not zero. Arguments are those of :func:`affine32`,
    with the zero point in place of the minimum.
    """
    # clamping beyond the code range changes no code, but an infinite quotient would spoil the Newton step
    x = tl.minimum(tl.maximum(x, scale * -(LEVELS + 1)), scale * (LEVELS + 1))
    rounded = (bounded(quotient(x, scale, r), -LEVELS, LEVELS) + ROUND32) - ROUND32
    return (bounded(rounded + zero, 0.0, LEVELS) + ROUND32).to(tl.int32, bitcast=True)
