"""Unpacking of codes inside a Triton kernel: one AND yields two codes, which tensor cores multiply without conversion.

``word & 0x000f000f`` of two adjacent int16 words is a pair of fp16 numbers of value code * 2**-24 (subnormals, which
tensor cores multiply exactly at full speed). Codes from higher bits of the word come out larger by a power of two,
which a factor on the scores or on the weights cancels. LLVM splits 16-bit operations into single halves, so the AND is
written in PTX; equivalent plain operations serve Triton's interpreter (``ASM=False``).

A kernel gets a format (:class:`kvbench.attention.phases.Format`) as one integer, ``FORM``: :func:`number` encodes it,
and the compile-time functions below decode it. docs/kernels.md shows the layout of the words.
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


def number(kind: str, bits: int, axis: str = "channel", group: int = 0, window: int = 0) -> int:
    """Return a format encoded as the integer that kernels take.

    Bits 0-1 hold the kind, bit 2 the axis, bits 4-8 the width of a code, bits 12-19 the group, and bits 20 and up the
    window.

    Args:
        kind: one of :data:`KINDS`.
        bits: bits of a code; 16 for exact tokens.
        axis: one of :data:`AXES`; empty for exact tokens.
        group: number of tokens (``channel``) or channels (``token``) that share parameters.
        window: tokens of a block whose groups may cross tile boundaries; 0 if no group does.
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
    """Return the number of bits of a code; 16 for exact tokens."""
    return form >> 4 & 31


@triton.constexpr_function
def group(form):
    """Return how many tokens or channels share parameters."""
    return form >> 12 & 255


@triton.constexpr_function
def window(form):
    """Return the tokens of a block whose groups may cross tile boundaries; 0 if no group does."""
    return form >> 20


@triton.constexpr_function
def cuts(form):
    """Return the number of groups in a window."""
    return -(-window(form) // group(form))


@triton.constexpr_function
def meeting(form):
    """Return an upper bound on the number of groups that have tokens in one tile, where groups cross tiles."""
    return 128 // (window(form) // cuts(form)) + 2


@triton.constexpr_function
def width(form):
    """Return the number of bits of a field of a word: those of a code, but 4 for 8-bit codes, stored in two planes."""
    return min(bits(form), 4)


@triton.constexpr_function
def fields(form):
    """Return the number of fields in a word."""
    return 16 // width(form)


@triton.constexpr_function
def rows(form):
    """Return the number of word rows of a tile of 128 tokens, which is also the number of tokens in a field."""
    return 8 * width(form)


@triton.constexpr_function
def planes(form):
    """Return the number of buffers with words: 2 for 8-bit codes, else 1, also for the buffer of exact tokens."""
    return 2 if bits(form) == 8 else 1


@triton.constexpr_function
def blocks(form, channels):
    """Return the number of groups into which a token's `channels` are divided (axis ``token``); else 1."""
    return channels // group(form) if kind(form) and axis(form) else 1


@triton.constexpr_function
def run(form):
    """Return how many consecutive fields of a tile share parameters (axis ``channel``)."""
    return min(group(form) // rows(form), fields(form))


@triton.constexpr_function
def lift(form, i):
    """Return the factor that turns unpacked codes, which are tiny fp16 numbers, into multiples of the format's scale.

    Args:
        form: the format.
        i: the field from which :func:`field` unpacked the codes; None if :func:`field_at` did, whose codes have the
            value code * 2**-24 in any field.
    """
    place = 0 if bits(form) == 8 or i is None else i * bits(form) % 8
    return 2.0 ** (24 - place) * (1 / 16 if kind(form) == 3 else 1.0)


@triton.jit
def field(words, FORM: tl.constexpr, i: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of one field of a block of words, as fp16 numbers of value code * 2**(place - 24).

    `place` is where the codes are within a byte of the word; :func:`lift` returns the factor that cancels the power.

    Args:
        words: a tuple with one block of int16 words per plane.
        FORM: the format.
        i: number of the field, known at compile time.
        ASM: True: inline PTX (on a GPU); False: plain operations (in the interpreter).
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
    """Return the codes of a field that is known only at run time, as code * 2**-24 for every field.

    Args:
        words: as for :func:`field`.
        FORM: as for :func:`field`.
        i: number of the field, a scalar.
        ASM: as for :func:`field`.
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
    """Return the step between codes and the value of code 0, both fp32, from the two stored parameters of groups.

    For hierarchical codes it is the step of the upper nibble; :func:`lift` contains the missing factor 1/16.

    Args:
        FORM: the format.
        scale: stored scales, fp16.
        second: stored minima, or Atom's zero points, fp16.
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
    """Load the stored parameters of tokens (axis ``token``) and return the scales and the minima.

    With one group of channels these are fp16 numbers; two or four groups of a token are one 32- or 64-bit integer.

    Args:
        PARAMS: pointers to scales and to minima, moved to the phase's first tile.
        CHANNEL_GROUPS: groups of channels of a token: 1, 2 or 4.
        first: first token, a scalar.
        tokens: offsets from it, a vector.
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
    """Return parameters loaded by :func:`of_tokens` in the form that is carried to the next iteration of a loop.

    One group per token is converted to fp32; several stay packed in an integer until :func:`group_of`, which saves
    registers.
    """
    return meaning(FORM, stored[0], stored[1]) if CHANNEL_GROUPS == 1 else stored


@triton.jit
def group_of(stored, FORM: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, c: tl.constexpr):
    """Return the step and the value of code 0 (:func:`meaning`) of group `c`, from what :func:`ready` returned."""
    if CHANNEL_GROUPS == 1:
        parameters = stored
    else:
        scale = (stored[0] >> (16 * c)).to(tl.int16).to(tl.float16, bitcast=True)
        parameters = meaning(FORM, scale, (stored[1] >> (16 * c)).to(tl.int16).to(tl.float16, bitcast=True))
    return parameters


@triton.jit
def channel_parameters(PARTS, FORM: tl.constexpr, KEY_DIM: tl.constexpr, number, query, alone, ONE_ROW: tl.constexpr):
    """Return the scaled query ``[D, R]`` fp16 and the bias of the scores ``[R]`` of one group (axis ``channel``).

    Args:
        PARTS: pointers of the keys (:func:`kvbench.attention.triton.kernel.located`).
        FORM: the format of the keys.
        KEY_DIM: channels of a key, D.
        number: number of the group, counted from the one that the pointers point to.
        query: normalised query ``[D, R]``.
        alone: the query's only row ``[D]``; used if `ONE_ROW`.
        ONE_ROW: the query has one row, so its bias is a sum over a vector.
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
