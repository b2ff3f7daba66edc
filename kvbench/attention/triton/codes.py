"""Unpacking of codes inside a Triton kernel: one AND yields two codes, which tensor cores multiply without conversion.

``word & 0x000f000f`` of two adjacent int16 words is a pair of fp16 numbers of value code * 2**-24 (subnormals, which
tensor cores multiply exactly at full speed). Codes from higher bits of the word come out multiplied by a power of two,
which a factor on the scores or on the weights cancels. LLVM splits 16-bit operations into single halves, so the AND is
written in PTX; equivalent plain operations serve Triton's interpreter (``ASM=False``).

A kernel gets a format (:class:`kvbench.attention.phases.Format`) as one integer, ``FORM``: :func:`format_number`
encodes it, and the compile-time functions below decode it. docs/kernels.md shows the layout of the words.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

KINDS, AXES = ("full", "affine", "atom", "hierarchical"), ("channel", "token")
FULL, AFFINE, ATOM, HIERARCHICAL = (tl.constexpr(kind) for kind in range(4))
CHANNEL, TOKEN = (tl.constexpr(axis) for axis in range(2))

_AND = "and.b32 $0, $1, {};"
_SHIFT_AND = "{{ .reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, {}; }}"
# 0xd8 takes the bits of the second operand under the mask, those of the first elsewhere: nibbles of $1 become the upper
# halves of bytes, those of $2 the lower ones; then bytes 0 and 2, or 1 and 3, become numbers
_EVEN = "shl.b32 t, $1, 4; lop3.b32 t, t, $2, 0x0f0f0f0f, 0xd8;"
_ODD = "shr.b32 t, $2, 4; lop3.b32 t, $1, t, 0x0f0f0f0f, 0xd8;"
_LOW, _HIGH = "and.b32 $0, t, 0x00ff00ff;", "prmt.b32 $0, t, 0, 0x4341;"
#: PTX for each field of two words: $1, or $1 and $2 for the upper and lower nibbles of 8 bits
ASM2 = tl.constexpr(tuple(form.format(f"0x{0x00030003 << p:08x}") for form in (_AND, _SHIFT_AND) for p in (0, 2, 4, 6)))
ASM4 = tl.constexpr(tuple(form.format(f"0x{0x000F000F << p:08x}") for form in (_AND, _SHIFT_AND) for p in (0, 4)))
ASM8 = tl.constexpr(
    tuple("{ .reg .b32 t; " + a + b + " }" for a, b in ((_EVEN, _LOW), (_ODD, _LOW), (_EVEN, _HIGH), (_ODD, _HIGH)))
)
#: the same for a field that is known only at run time: both halves of the last operand hold the number of its first bit
ASM_AT2 = tl.constexpr("{ .reg .b32 s; and.b32 s, $2, 15; shr.b32 s, $1, s; and.b32 $0, s, 0x00030003; }")
ASM_AT4 = tl.constexpr("{ .reg .b32 s; and.b32 s, $2, 15; shr.b32 s, $1, s; and.b32 $0, s, 0x000f000f; }")
ASM_AT8 = tl.constexpr(
    "{ .reg .b32 s, u, l; and.b32 s, $3, 15; shr.b32 u, $1, s; shr.b32 l, $2, s; and.b32 l, l, 0x000f000f; "
    "shl.b32 u, u, 4; and.b32 u, u, 0x00f000f0; or.b32 $0, u, l; }"
)


def format_number(kind: str, bits: int, axis: str = "channel", group: int = 0, window: int = 0) -> int:
    """Encode a format as the single integer that kernels take as compile-time argument.

    Bits 0-1 of the integer contain the kind, bit 2 the axis, bits 4-8 the width of a code, bits 12-19 the group size,
    and bits 20 and up the window.

    Args:
        bits: bits of a code; 16 in full precision.
        axis: one of :data:`AXES`; empty in full precision.
        group: number of tokens (axis ``channel``) or channels (axis ``token``) that share parameters.
        window: :attr:`kvbench.attention.phases.Format.window`: number of tokens that are packed at a time, if groups
            may cross tile boundaries; 0 if no group does.
    """
    return KINDS.index(kind) | (AXES.index(axis or "channel") << 2) | (bits << 4) | (group << 12) | (window << 20)


@triton.constexpr_function
def kind(form):
    """Return the kind of a format: FULL, AFFINE, ATOM or HIERARCHICAL."""
    return form & 3


@triton.constexpr_function
def axis(form):
    """Return the axis of a format: CHANNEL or TOKEN."""
    return form >> 2 & 1


@triton.constexpr_function
def bits(form):
    """Return the number of bits of a code; 16 in full precision."""
    return form >> 4 & 31


@triton.constexpr_function
def group(form):
    """Return the group size: the number of elements that share one scale and one minimum (or zero point).

    With axis ``channel`` the elements of a group are consecutive tokens of one channel, with axis ``token`` consecutive
    channels of one token.
    """
    return form >> 12 & 255


@triton.constexpr_function
def window(form):
    """Return how many tokens are packed at a time if groups may cross tile boundaries; 0 if no group does."""
    return form >> 20


@triton.constexpr_function
def cuts(form):
    """Return the number of groups into which :func:`window` tokens are divided."""
    return -(-window(form) // group(form))


@triton.constexpr_function
def meeting(form):
    """Return an upper bound on the groups per channel that have tokens in one tile, if groups may cross tiles."""
    return 128 // (window(form) // cuts(form)) + 2


@triton.constexpr_function
def width(form):
    """Return the number of bits of one field: the part of an int16 word that belongs to one token.

    This is the number of bits of a code, except that 8-bit codes have two fields of 4 bits, in two planes.
    """
    return min(bits(form), 4)


@triton.constexpr_function
def fields(form):
    """Return the number of fields in an int16 word."""
    return 16 // width(form)


@triton.constexpr_function
def word_row_count(form):
    """Return the number of word rows in a tile of 128 tokens.

    The tokens of a tile are divided over the fields: a word row contains one token per field. So each field
    holds the codes of as many tokens as there are word rows.
    """
    return 8 * width(form)


@triton.constexpr_function
def planes(form):
    """Return the number of buffers that hold the tokens: 2 for 8-bit codes, which have two planes of words, else 1."""
    return 2 if bits(form) == 8 else 1


@triton.constexpr_function
def channel_group_count(form, channels):
    """Return the number of groups into which the channels of one token are divided; 1 unless the axis is ``token``."""
    return channels // group(form) if kind(form) and axis(form) else 1


@triton.constexpr_function
def group_run(form):
    """Return how many consecutive fields of a tile hold tokens of the same group, for a per-channel format."""
    return min(group(form) // word_row_count(form), fields(form))


@triton.constexpr_function
def lift(form, i):
    """Return the factor that turns unpacked codes into the integer codes, or into a 16th of them for hierarchical ones.

    Unpacking yields tiny fp16 numbers: the codes divided by a power of two, which this factor cancels.

    Args:
        i: index of the field from which :func:`field` unpacked the codes. None if :func:`field_at` unpacked them; these
            have the value code * 2**-24 for every field.
    """
    place = 0 if bits(form) == 8 or i is None else i * bits(form) % 8
    return 2.0 ** (24 - place) * (1 / 16 if kind(form) == 3 else 1.0)


@triton.jit
def field(words, FORM: tl.constexpr, i: tl.constexpr, ASM: tl.constexpr):
    """Extract the codes of one field from a block of words, as fp16 numbers scaled by a power of two.

    An unpacked code is an fp16 number with the value code * 2**(place - 24). Here `place` is the position of the
    field's lowest bit within its byte, or 0 for 8-bit codes. :func:`lift` returns the factor that cancels the power of
    two.

    Args:
        words: tuple with one block of int16 words per plane (:func:`planes`), all of the same shape.
        i: index of the field, 0 to ``fields(FORM) - 1``, known at compile time.
    """
    if bits(FORM) == 8:
        # the upper nibble from one plane, the lower from the other: 8 bits are still an fp16 subnormal
        if ASM:
            codes = tl.inline_asm_elementwise(ASM8[i], "=r,r,r", [words[0], words[1]], tl.float16, True, 2)
        else:
            whole = (((words[0] >> (4 * i)) & 15) << 4) | ((words[1] >> (4 * i)) & 15)
            codes = whole.to(tl.float16, bitcast=True)
    elif bits(FORM) == 4:
        # fields 0 and 1 are masked in place; 2 and 3 are first shifted down a byte, into the mantissa's low bits
        if ASM:
            codes = tl.inline_asm_elementwise(ASM4[i], "=r,r", [words[0]], tl.float16, True, 2)
        else:
            codes = ((words[0] >> (i // 2 * 8)) & (15 << (i % 2 * 4))).to(tl.float16, bitcast=True)
    else:
        if ASM:
            codes = tl.inline_asm_elementwise(ASM2[i], "=r,r", [words[0]], tl.float16, True, 2)
        else:
            codes = ((words[0] >> (i // 4 * 8)) & (3 << (i % 4 * 2))).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def field_at(words, FORM: tl.constexpr, i, ASM: tl.constexpr):
    """Extract the codes of one field like :func:`field`, but with an index that is known only at run time.

    Args:
        i: index of the field, a scalar tensor.

    Returns:
        fp16 numbers with the value code * 2**-24, in the shape of a block of words.
    """
    # one shift more than with a constant mask; used for parts of tiles only
    shift = (i * width(FORM)).to(tl.int16)
    if bits(FORM) == 8:
        if ASM:
            codes = tl.inline_asm_elementwise(ASM_AT8, "=r,r,r,r", [words[0], words[1], shift], tl.float16, True, 2)
        else:
            whole = (((words[0] >> shift) & 15) << 4) | ((words[1] >> shift) & 15)
            codes = whole.to(tl.float16, bitcast=True)
    elif bits(FORM) == 4:
        if ASM:
            codes = tl.inline_asm_elementwise(ASM_AT4, "=r,r,r", [words[0], shift], tl.float16, True, 2)
        else:
            codes = ((words[0] >> shift) & 15).to(tl.float16, bitcast=True)
    else:
        if ASM:
            codes = tl.inline_asm_elementwise(ASM_AT2, "=r,r,r", [words[0], shift], tl.float16, True, 2)
        else:
            codes = ((words[0] >> shift) & 3).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def meaning(FORM: tl.constexpr, scale, second):
    """Convert stored scales and minima (or zero points) to a form that is the same in every kind of format.

    That form is two fp32 numbers per group: the step between codes, and the element for which code 0 stands. A code c
    then stands for step * c + element of code 0. For hierarchical codes, the step returned here is that of the upper
    nibble, 16 times too large; :func:`lift` contains the missing factor 1/16.

    Args:
        second: block of stored minima (zero points if the kind is ATOM), fp16, of the same shape.

    Returns:
        The steps and the elements for code 0, both fp32 in the shape of `scale`.
    """
    scale = scale.to(tl.float32)
    second = second.to(tl.float32)
    if kind(FORM) == ATOM:
        # (code - zero) * scale: code 0 is worth -zero * scale
        second = -second * scale
    if kind(FORM) == HIERARCHICAL:
        # 16 U + L + 8 is worth scale * (code - 8) / 16 + minimum
        second -= 0.5 * scale
    return scale, second


@triton.jit
def of_tokens(PARAMS, CHANNEL_GROUPS: tl.constexpr, first, tokens):
    """Load the scales and minima (or zero points) of consecutive tokens, for a per-token format.

    All groups of a token are loaded at once: one fp16 number per token for one group, and one 32-bit or 64-bit integer
    that contains two or four fp16 numbers otherwise. :func:`group_of` extracts the parameters of a group.

    Args:
        PARAMS: pair of pointers, to scales and to minima (or zero points). They point to the phase's first tile.
        CHANNEL_GROUPS: number of groups into which the channels of a token are divided: 1, 2 or 4.
        first: index of the first token, a scalar, counted from the first token of the phase's first tile.
        tokens: offsets of the tokens from `first`, ``[N]``.

    Returns:
        Two blocks ``[N]``: scales, and minima or zero points.
    """
    # one wider load in place of a small one for each group
    if CHANNEL_GROUPS == 1:
        stored = (tl.load(PARAMS[0] + first + tokens), tl.load(PARAMS[1] + first + tokens))
    elif CHANNEL_GROUPS == 2:
        whole: tl.constexpr = tl.pointer_type(tl.int32)
        stored = (tl.load(PARAMS[0].to(whole) + first + tokens), tl.load(PARAMS[1].to(whole) + first + tokens))
    else:
        long: tl.constexpr = tl.pointer_type(tl.int64)
        stored = (tl.load(PARAMS[0].to(long) + first + tokens), tl.load(PARAMS[1].to(long) + first + tokens))
    return stored


@triton.jit
def ready(stored, FORM: tl.constexpr, CHANNEL_GROUPS: tl.constexpr):
    """Prepare loaded scales and minima of tokens for use in the next iteration of a loop.

    If a token has one group, they are converted to fp32 (:func:`meaning`). If it has several, they stay packed in an
    integer until :func:`group_of` extracts them, which saves registers.

    Returns:
        A pair of blocks ``[N]`` for :func:`group_of`.
    """
    return meaning(FORM, stored[0], stored[1]) if CHANNEL_GROUPS == 1 else stored


@triton.jit
def group_of(stored, FORM: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, c: tl.constexpr):
    """Extract the parameters of one group of channels, for every token.

    Returns:
        The step between codes and the element for code 0 (:func:`meaning`), both fp32 ``[N]``.
    """
    if CHANNEL_GROUPS == 1:
        parameters = stored
    else:
        scale = (stored[0] >> (16 * c)).to(tl.int16).to(tl.float16, bitcast=True)
        parameters = meaning(FORM, scale, (stored[1] >> (16 * c)).to(tl.int16).to(tl.float16, bitcast=True))
    return parameters


@triton.jit
def channel_parameters(PARTS, FORM: tl.constexpr, KEY_DIM: tl.constexpr, number, query, alone, ONE_ROW: tl.constexpr):
    """Fold the scales and minima of one group of tokens into the query, for keys in a per-channel format.

    All keys of the group have the same scale in a channel. So the query is multiplied by the scales once, in place of
    every key. The minima become a bias of the scores, which is the same for all keys of the group.

    Args:
        number: index of the group, counted from the one to which the pointers point.
        alone: the only row of the query, ``[D]``; used only if `ONE_ROW`.
        ONE_ROW: True if the query has only one row. The bias is then a sum over a vector.

    Returns:
        The scaled query ``[D, R]`` in fp16, and the bias of the scores, ``[R]`` (a scalar if `ONE_ROW`).
    """
    at = tl.arange(0, KEY_DIM)
    stored = tl.load(PARTS[planes(FORM)] + number * KEY_DIM + at)
    _, least = meaning(FORM, stored, tl.load(PARTS[planes(FORM) + 1] + number * KEY_DIM + at))
    # the minima are multiplied by the query once per group instead of once per token
    if ONE_ROW:
        bias = tl.sum(alone * least, 0)
    else:
        bias = tl.sum(query.to(tl.float32) * least[:, None], 0)
    return query * stored[:, None], bias
