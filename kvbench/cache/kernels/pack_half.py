"""Codes of fp16 pairs (Triton): inline PTX on packed halves, with twins in plain operations for the interpreter.

The arithmetic is that of :mod:`~kvbench.cache.kernels.pack_math`, but with two elements per instruction. Constants are
pairs of fp16 numbers: 0x6400 is 1024 and 0x6608 is 1544; added to a quotient, they leave its rounded value in the low
bits of the sum. A returned code is in the low bits of its 16 bits; the other bits are not zero.

Names that end in 0 belong to the lower channel of a pair, those in 1 to the upper. Of the group of each element, `part`
is the *share*, the factor 1 or 1/4 from :func:`~kvbench.cache.kernels.pack_math.share`; `base` is the minimum times the
share; `r` is fl(1 / scale) / share. LEVELS is the largest code.

Operands of the PTX are numbered in the order of the call: first the results (``$0``, or ``$0`` and ``$1``), then the
arguments.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.cache.kernels.pack_math import INTERPRETED, bit_pair, half_pair, high_half, low_half, reciprocal, to_half

# offset = x * share - base * share; q = offset / (scale * share), at most the largest code. $X: the pairs; $S: shares;
# $N: -base * share; $0R and $1R: fl(1 / scale) / share of either half; $T: the largest code
_OFFSET = """
    .reg .b32 t; .reg .b16 h0, h1; .reg .f32 f0, f1;
    fma.rn.f16x2 t, $X, $S, $N;
    mov.b32 {h0, h1}, t;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;
    mul.rn.f32 f0, f0, $0R; mul.rn.f32 f1, f1, $1R;
    cvt.rn.f16x2.f32 t, f1, f0;
    min.f16x2 t, t, $T;
"""
AFFINE = tl.constexpr(
    "{ .reg .b32 magic; mov.b32 magic, 0x64006400;"
    + _OFFSET.replace("$X", "$1").replace("$S", "$2").replace("$N", "$3").replace("$0R", "$4").replace("$1R", "$5")
    .replace("$T", "$6")
    + "add.rn.f16x2 $0, t, magic; }"
)  # fmt: skip
HIERARCHICAL = tl.constexpr(
    "{ .reg .b32 magic, back, least, most, bias, n, u; mov.b32 magic, 0x64006400; mov.b32 back, 0xE400E400;"
    "mov.b32 least, 0xC800C800; mov.b32 most, 0x47004700; mov.b32 bias, 0x66086608;"
    + _OFFSET.replace("$X", "$2").replace("$S", "$3").replace("$N", "$4").replace("$0R", "$5").replace("$1R", "$6")
    .replace("$T", "$7")
    + """
    add.rn.f16x2 u, t, magic;
    add.rn.f16x2 n, u, back;
    mul.rn.f16x2 n, n, $8;
    sub.rn.f16x2 n, n, $4;
    neg.f16x2 n, n;
    fma.rn.f16x2 t, $2, $3, n;
    mov.b32 {h0, h1}, t;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;
    mul.rn.f32 f0, f0, $9; mul.rn.f32 f1, f1, $10;
    cvt.rn.f16x2.f32 t, f1, f0;
    max.f16x2 t, t, least; min.f16x2 t, t, most;
    add.rn.f16x2 $1, t, bias;
    mov.b32 $0, u; }"""
)  # fmt: skip
ATOM = tl.constexpr(
    """{
    .reg .b32 t, magic, first; .reg .b16 h0, h1; .reg .f32 f0, f1;
    mov.b32 magic, 0x66006600; mov.b32 first, 0x64006400;
    mov.b32 {h0, h1}, $1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;
    mul.rn.f32 f0, f0, $2; mul.rn.f32 f1, f1, $3;
    cvt.rn.f16x2.f32 t, f1, f0;
    max.f16x2 t, t, $5; min.f16x2 t, t, $6;
    add.rn.f16x2 t, t, magic;
    add.rn.f16x2 t, t, $4;
    max.f16x2 t, t, first; min.f16x2 $0, t, $7; }"""
)


@triton.jit
def _rounded_half_even(q, bias: tl.constexpr):
    """Return the bits of ``q + bias`` in fp16, whose low bits hold `q` rounded half to even."""
    return (q + bias).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _affine_twin(x, part, base, r, LEVELS: tl.constexpr):
    """Return the codes of one half of the pairs in two forms: in the low bits of an int32, and as fp32 numbers."""
    offset = to_half(x * part - base)
    rounded = to_half(tl.minimum(to_half(offset * r), LEVELS) + 1024.0)
    return rounded.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32), rounded - 1024.0


@triton.jit
def affine16(x, part0, part1, base0, base1, r0, r1, LEVELS: tl.constexpr):
    """Return the affine codes of pairs of fp16 elements."""
    if INTERPRETED:
        low, _ = _affine_twin(low_half(x, True), part0, base0, r0, LEVELS)
        high, _ = _affine_twin(high_half(x, True), part1, base1, r1, LEVELS)
        codes = bit_pair(low, high)
    else:
        # the largest code (3, 7, 15 or 255) as a pair of fp16 numbers
        small: tl.constexpr = 0x42004200 if LEVELS == 3 else 0x47004700
        top: tl.constexpr = small if LEVELS < 15 else (0x4B804B80 if LEVELS == 15 else 0x5BF85BF8)
        args = [x, half_pair(part0, part1), half_pair(-base0, -base1), r0, r1, tl.full(r0.shape, top, tl.int32)]
        codes = tl.inline_asm_elementwise(AFFINE, "=r,r,r,r,f,f,r", args, tl.int32, is_pure=True, pack=1)
    return codes


@triton.jit
def _lower_twin(x, number, part, step, base, fine):
    """Return the lower nibbles of one half of the pairs, in the low bits of an int32.

    Args:
        x: elements, fp32.
        number: their upper nibbles, as fp32 numbers.
        step: scale times share.
        fine: fl(1 / s) / share, where s is scale / 16 rounded to fp16.
    """
    # the decoded upper nibble; the lower nibble encodes the remainder in sixteenths of a step
    near = to_half(to_half(number * step) + base)
    q = to_half(to_half(x * part - near) * fine)
    return _rounded_half_even(tl.minimum(tl.maximum(q, -8.0), 7.0), 1544.0)


@triton.jit
def hierarchical16(x, part0, part1, base0, base1, r0, r1, scale0, scale1):
    """Return the hierarchical codes of pairs of fp16 elements: pairs of upper nibbles, and pairs of lower nibbles.

    The upper nibble is an affine code. The lower nibble encodes the difference between the element and its decoded
    upper nibble, in sixteenths of the scale.
    """
    # fp16 rounds a sixteenth of a small scale, so its reciprocal is not sixteen times that of the scale
    fine0 = reciprocal(to_half(scale0 * 0.0625)) * tl.where(part0 == 1.0, 1.0, 4.0)
    fine1 = reciprocal(to_half(scale1 * 0.0625)) * tl.where(part1 == 1.0, 1.0, 4.0)
    if INTERPRETED:
        x0, x1 = low_half(x, True), high_half(x, True)
        low, number0 = _affine_twin(x0, part0, base0, r0, 15)
        high, number1 = _affine_twin(x1, part1, base1, r1, 15)
        upper = bit_pair(low, high)  # lower nibbles are computed from number0 and number1
        low = _lower_twin(x0, number0, part0, scale0 * part0, base0, fine0)
        lower = bit_pair(low, _lower_twin(x1, number1, part1, scale1 * part1, base1, fine1))
    else:
        steps, top = half_pair(scale0 * part0, scale1 * part1), tl.full(r0.shape, 0x4B804B80, tl.int32)
        args = [x, half_pair(part0, part1), half_pair(-base0, -base1), r0, r1, top, steps, fine0, fine1]
        upper, lower = tl.inline_asm_elementwise(
            HIERARCHICAL, "=&r,=&r,r,r,r,f,f,r,r,f,f", args, (tl.int32, tl.int32), is_pure=True, pack=1
        )
    return upper, lower


@triton.jit
def _atom_twin(x, r, zero, LEVELS: tl.constexpr):
    """Return the codes of fp32 elements `x`, one of each pair: the first ones or the second; `r` is fl(1 / scale)."""
    q = tl.minimum(tl.maximum(to_half(x * r), -LEVELS), LEVELS)
    # + 1536 rounds q to an integer; + (zero - 512) then gives 1024 + q + zero, which fp16 represents exactly
    q = to_half(q + 1536.0) + (zero - 512.0)
    return _rounded_half_even(tl.minimum(tl.maximum(q, 1024.0), 1024.0 + LEVELS), 0.0)


@triton.jit
def atom16(x, r0, r1, zero0, zero1, LEVELS: tl.constexpr):
    """Return the codes of Atom's quantizer for pairs of fp16 elements; `r` is fl(1 / scale), without a share."""
    if INTERPRETED:
        low = _atom_twin(low_half(x, True), r0, zero0, LEVELS)
        codes = bit_pair(low, _atom_twin(high_half(x, True), r1, zero1, LEVELS))
    else:
        # the largest code (3, 7, 15 or 255) as a pair of fp16 numbers
        small: tl.constexpr = 0x42004200 if LEVELS == 3 else 0x47004700
        top: tl.constexpr = small if LEVELS < 15 else (0x4B804B80 if LEVELS == 15 else 0x5BF85BF8)
        # -LEVELS (the sign bits set), and 1024 + LEVELS
        least = tl.full(r0.shape, top - 0x80000000 + 0x8000, tl.int32)
        last = tl.full(r0.shape, 0x64006400 + LEVELS * 0x10001, tl.int32)
        args = [x, r0, r1, half_pair(zero0 - 512.0, zero1 - 512.0), least, tl.full(r0.shape, top, tl.int32), last]
        codes = tl.inline_asm_elementwise(ATOM, "=r,r,f,f,r,r,r,r", args, tl.int32, is_pure=True, pack=1)
    return codes
