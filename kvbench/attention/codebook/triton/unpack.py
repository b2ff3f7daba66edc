"""Look-up of a codebook's levels inside a Triton kernel: byte permutations of registers, without any load.

The levels of a codebook of up to 8 entries are 16 bytes: four registers, two with the lower bytes of the fp16 numbers
and two with the upper ones. PTX's ``prmt`` picks four bytes by four selectors of 4 bits each. So four codes in four
nibbles are looked up by two instructions, and two more put the bytes together. A code of 3 bits gets its third bit from
the second plane; a codebook of 16 levels has two sets of registers, between which the fourth bit selects.

Equivalent plain operations serve Triton's interpreter (``ASM=False``).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

#: registers that hold the lower bytes of the levels, and as many the upper ones, by bits of a code
TABLES = tl.constexpr({2: 1, 3: 2, 4: 4})


def _pairs(first: str, second: str, outputs: tuple[int, int, int, int]) -> str:
    """Return PTX that joins the bytes of four fields of two words to pairs of fp16 numbers, one pair per field."""
    joined = ""
    for word, low, high in (("a", f"{first}l", f"{first}h"), ("b", f"{second}l", f"{second}h")):
        joined += f"prmt.b32 {word}0, {low}, {high}, 0x5140; prmt.b32 {word}1, {low}, {high}, 0x7362; "
    for half, (one, other) in enumerate((outputs[:2], outputs[2:])):
        joined += f"prmt.b32 ${one}, a{half}, b{half}, 0x5410; prmt.b32 ${other}, a{half}, b{half}, 0x7632; "
    return joined


def ptx(bits: int) -> tuple[str, str]:
    """Return the PTX that looks up all fields of two words, and its constraints.

    The operands are one pair of fp16 numbers per field, then the words of each plane (two 16-bit words in a register),
    for 3 bits the shift of the second plane, then the lower bytes of the levels and their upper bytes (each given
    twice, as Triton passes a register per element).
    """
    fields = 4 if bits == 4 else 8
    words = 2 if bits == 3 else 1
    sets = TABLES.value[bits]
    first = fields + words + (1 if bits == 3 else 0)
    low = [f"${first + 2 * i}" for i in range(sets)]
    high = [f"${first + 2 * (sets + i)}" for i in range(sets)]
    names = "t, s, e, o, f, g, m, n, a0, a1, b0, b1, pl, ph, ql, qh, rl, rh, k"
    code = f"{{ .reg .b32 {names}; "
    word = f"${fields}"
    if bits == 4:
        code += f"and.b32 e, {word}, 0x77777777; shr.b32 f, e, 16; "
        code += f"shr.b32 m, {word}, 3; and.b32 m, m, 0x11111111; shr.b32 n, m, 16; mov.b32 k, 0xff00; "
        for name, selector, mask in (("p", "e", "m"), ("q", "f", "n")):
            code += f"prmt.b32 s, k, 0, {mask}; "
            for part, table in (("l", low), ("h", high)):
                code += f"prmt.b32 {name}{part}, {table[0]}, {table[1]}, {selector}; "
                code += f"prmt.b32 t, {table[2]}, {table[3]}, {selector}; "
                code += f"lop3.b32 {name}{part}, s, t, {name}{part}, 0xca; "
        code += _pairs("p", "q", (0, 1, 2, 3))
    else:
        code += f"and.b32 e, {word}, 0x33333333; shr.b32 o, {word}, 2; and.b32 o, o, 0x33333333; "
        if bits == 3:
            code += f"and.b32 s, ${fields + 2}, 15; shr.b32 s, ${fields + 1}, s; "
            code += "shl.b32 t, s, 2; and.b32 t, t, 0x44444444; or.b32 e, e, t; "
            code += "and.b32 t, s, 0x44444444; or.b32 o, o, t; "
        for selector, outputs in (("e", (0, 2, 4, 6)), ("o", (1, 3, 5, 7))):
            code += f"shr.b32 f, {selector}, 16; "
            for name, nibbles in (("p", selector), ("q", "f")):
                code += f"prmt.b32 {name}l, {low[0]}, {low[-1]}, {nibbles}; "
                code += f"prmt.b32 {name}h, {high[0]}, {high[-1]}, {nibbles}; "
            code += _pairs("p", "q", outputs)
    inputs = words + (1 if bits == 3 else 0) + 4 * sets
    return code + "}", ",".join(["=r"] * fields + ["r"] * inputs)


ASM = tl.constexpr({bits: ptx(bits)[0] for bits in (2, 3, 4)})
CONSTRAINTS = tl.constexpr({bits: ptx(bits)[1] for bits in (2, 3, 4)})
#: rotation of two pairs of channels by angles, after level * scale + offset: $0, $1 from levels to cosine and sine
ROTATE = tl.constexpr(
    "{ .reg .b32 x, y, n; fma.rn.f16x2 x, $2, $4, $6; fma.rn.f16x2 y, $3, $5, $7; neg.f16x2 n, $9; "
    "mul.rn.f16x2 $0, x, $8; fma.rn.f16x2 $0, y, n, $0; mul.rn.f16x2 $1, y, $8; fma.rn.f16x2 $1, x, $9, $1; }"
)
SCALE = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


@triton.constexpr_function
def fields(bits):
    """Return the number of tokens whose codes share a word: 4 for codes of 4 bits, else 8 (of the plane of 2 bits)."""
    return 4 if bits == 4 else 8


@triton.jit
def table(levels, BITS: tl.constexpr):
    """Load the levels of a codebook into registers for :func:`unpack`.

    Args:
        levels: pointer to the levels of one row, fp32 ``[2**BITS]``.
        BITS: bits of a code.

    Returns:
        A tuple of int32 scalars: registers with the lower bytes of the fp16 levels, then those with the upper bytes.
    """
    lows = ()
    highs = ()
    for r in tl.static_range((1 << BITS) // 4):
        low = 0
        high = 0
        for j in tl.static_range(4):
            # the plane of single bits has the lowest bit of a code of 3 bits, and selects between two registers
            code = 2 * j + r if BITS == 3 else 4 * r + j
            bits = tl.load(levels + code).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            low = low | ((bits & 255) << (8 * j))
            high = high | (((bits >> 8) & 255) << (8 * j))
        lows = lows + (low,)
        highs = highs + (high,)
    return lows + highs


@triton.jit
def unpack(words, shift, registers, levels, BITS: tl.constexpr, ASM_: tl.constexpr):
    """Look up the levels of all codes in a block of words.

    Args:
        words: tuple of blocks of int16 words, one per plane, all of the same shape. For 3 bits, the second contains in
            row r the word of the second plane to which the tokens of row r belong.
        shift: for 3 bits, by how much to shift the words of the second plane, int16 in the shape of the words: 1 in the
            second half of the rows, else 0.
        registers: the result of :func:`table`.
        levels: pointer to the levels, for the interpreter.
        BITS: bits of a code.
        ASM_: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).

    Returns:
        A tuple of blocks of fp16 levels in the shape of the words, one per field.
    """
    looked_up = ()
    if ASM_:
        if BITS == 2:
            looked_up = tl.inline_asm_elementwise(
                ASM[2], CONSTRAINTS[2], [words[0], registers[0], registers[1]], (tl.float16,) * 8, True, 2
            )
        elif BITS == 3:
            looked_up = tl.inline_asm_elementwise(
                ASM[3],
                CONSTRAINTS[3],
                [words[0], words[1], shift, registers[0], registers[1], registers[2], registers[3]],
                (tl.float16,) * 8,
                True,
                2,
            )
        else:
            looked_up = tl.inline_asm_elementwise(
                ASM[4],
                CONSTRAINTS[4],
                [
                    words[0], registers[0], registers[1], registers[2], registers[3],
                    registers[4], registers[5], registers[6], registers[7],
                ],
                (tl.float16,) * 4,
                True,
                2,
            )  # fmt: skip
    else:
        for i in tl.static_range(fields(BITS)):
            if BITS == 4:
                code = (words[0] >> (4 * i)) & 15
            else:
                code = (words[0] >> (2 * i)) & 3
            if BITS == 3:
                code = (code << 1) | ((words[1] >> (shift + 2 * i)) & 1)
            looked_up = looked_up + (tl.load(levels + code.to(tl.int32)).to(tl.float16),)
    return looked_up


@triton.jit
def rotated(first, second, scales, offsets, cos, sin, ASM_: tl.constexpr):
    """Dequantize both halves of the channels of a block of keys, and apply RoPE to them.

    Args:
        first: levels of the first half of the channels, fp16 ``[N, D / 2]``.
        second: levels of the second half.
        scales: pair of the ranges of the two halves, fp16 ``[1, D / 2]``.
        offsets: pair of their offsets.
        cos: cosines of the angles by which to rotate, fp16 ``[N, D / 2]``.
        sin: sines of these angles.
        ASM_: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).

    Returns:
        The two halves of the rotated keys, fp16.
    """
    if ASM_:
        x, y = tl.inline_asm_elementwise(
            ROTATE,
            "=r,=r,r,r,r,r,r,r,r,r",
            [first, second, scales[0], scales[1], offsets[0], offsets[1], cos, sin],
            (tl.float16, tl.float16),
            True,
            2,
        )
    else:
        a = first.to(tl.float32) * scales[0].to(tl.float32) + offsets[0].to(tl.float32)
        b = second.to(tl.float32) * scales[1].to(tl.float32) + offsets[1].to(tl.float32)
        c, s = cos.to(tl.float32), sin.to(tl.float32)
        x = (a * c - b * s).to(tl.float16)
        y = (b * c + a * s).to(tl.float16)
    return x, y


@triton.jit
def dequantized(levels, scale, offset, ASM_: tl.constexpr):
    """Return ``levels * scale + offset`` in fp16.

    Args:
        levels: levels, fp16 ``[N, D]``.
        scale: ranges of the channels, fp16 ``[1, D]``.
        offset: offsets of the channels, fp16 ``[1, D]``.
        ASM_: True to use inline PTX (on a GPU), False to use plain Triton operations (in the interpreter).
    """
    if ASM_:
        x = tl.inline_asm_elementwise(SCALE, "=r,r,r,r", [levels, scale, offset], tl.float16, True, 2)
    else:
        x = (levels.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)).to(tl.float16)
    return x
