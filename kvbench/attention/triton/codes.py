"""Codes out of words inside a Triton kernel: one AND for two codes, which tensor cores then multiply as they are.

``word & 0x000f000f`` of two neighbouring int16 words is a pair of fp16 numbers of value code * 2**-24 (subnormals,
which matrix units multiply exactly at full speed); codes that lie higher in the word come out larger by a power of two,
which the factor of the scores or of the weights takes back. LLVM splits 16-bit operations into single halves, so the
AND is written in PTX; the same in plain operations serves Triton's interpreter (``ASM=False``).

A format (:class:`kvbench.attention.phases.Format`) reaches a kernel as one integer, ``FORM``, made by :func:`number`
and read by the functions of constants below. docs/kernels.md draws the words.
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
#: the same for a field that is known at run time only: its first bit is in both halves of the last operand
ASM_AT2 = tl.constexpr("{ .reg .b32 s; and.b32 s, $2, 15; shr.b32 s, $1, s; and.b32 $0, s, 0x00030003; }")
ASM_AT4 = tl.constexpr("{ .reg .b32 s; and.b32 s, $2, 15; shr.b32 s, $1, s; and.b32 $0, s, 0x000f000f; }")
ASM_AT8 = tl.constexpr(
    "{ .reg .b32 s, u, l; and.b32 s, $3, 15; shr.b32 u, $1, s; shr.b32 l, $2, s; and.b32 l, l, 0x000f000f; "
    "shl.b32 u, u, 4; and.b32 u, u, 0x00f000f0; or.b32 $0, u, l; }"
)


def number(kind: str, bits: int, axis: str = "channel", group: int = 0, window: int = 0) -> int:
    """Return a format as the integer that a kernel is given.

    Bits 0-1 are the kind, 2 the axis, 4-8 the width of a code, 12-19 the group, and those from 20 on the window.

    Args:
        kind: one of :data:`KINDS`.
        bits: of a code; 16 for exact tokens.
        axis: one of :data:`AXES`; empty for exact tokens.
        group: tokens (``channel``) or channels (``token``) that share parameters.
        window: tokens of a block whose groups may lie across the ends of tiles; 0: none do.
    """
    return KINDS.index(kind) | (AXES.index(axis or "channel") << 2) | (bits << 4) | (group << 12) | (window << 20)


@triton.constexpr_function
def kind(form):
    """Return FULL, AFFINE, ATOM or HIERARCHICAL."""
    return form & 3


@triton.constexpr_function
def axis(form):
    """Return CHANNEL or TOKEN."""
    return form >> 2 & 1


@triton.constexpr_function
def bits(form):
    """Return the bits of a code."""
    return form >> 4 & 31


@triton.constexpr_function
def group(form):
    """Return how many tokens or channels share parameters."""
    return form >> 12 & 255


@triton.constexpr_function
def window(form):
    """Return the tokens of a block whose groups may lie across the ends of tiles; 0: none do."""
    return form >> 20


@triton.constexpr_function
def cuts(form):
    """Return the number of groups in a window."""
    return -(-window(form) // group(form))


@triton.constexpr_function
def meeting(form):
    """Return the most groups of windows of which one tile may hold tokens."""
    return 128 // (window(form) // cuts(form)) + 2


@triton.constexpr_function
def width(form):
    """Return the bits of a field of a word: 8-bit codes lie in two planes of 4."""
    return min(bits(form), 4)


@triton.constexpr_function
def fields(form):
    """Return the number of fields in a word."""
    return 16 // width(form)


@triton.constexpr_function
def rows(form):
    """Return the word rows of a tile of 128 tokens, which is the number of tokens in a field."""
    return 8 * width(form)


@triton.constexpr_function
def planes(form):
    """Return the number of buffers of words; 1 also for the one buffer of exact tokens."""
    return 2 if bits(form) == 8 else 1


@triton.constexpr_function
def blocks(form, channels):
    """Return how many groups of `channels` have parameters of their own (axis ``token``); else 1."""
    return channels // group(form) if kind(form) and axis(form) else 1


@triton.constexpr_function
def run(form):
    """Return how many consecutive fields of a tile share parameters (axis ``channel``)."""
    return min(group(form) // rows(form), fields(form))


@triton.constexpr_function
def lift(form, i):
    """Return the factor that makes codes of :func:`field` whole numbers again, in steps of the format's scale.

    Args:
        form: the format.
        i: the field that the codes are from; None: :func:`field_at`, whose codes are code * 2**-24 whatever the field.
    """
    place = 0 if bits(form) == 8 or i is None else i * bits(form) % 8
    return 2.0 ** (24 - place) * (1 / 16 if kind(form) == 3 else 1.0)


@triton.jit
def field(words, FORM: tl.constexpr, i: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of one field of a block of words, as fp16 numbers of value code * 2**(place - 24).

    Args:
        words: a tuple: a block of int16 words for each plane.
        FORM: the format.
        i: the field, known when the kernel is compiled.
        ASM: inline PTX (a GPU), or plain operations (the interpreter).
    """
    if bits(FORM) == 8:
        # the upper nibble from one plane, the lower from the other: 8 bits are still an fp16 subnormal
        if ASM:
            codes = tl.inline_asm_elementwise(ASM8[i], "=r,r,r", [words[0], words[1]], tl.float16, True, 2)
        else:
            whole = (((words[0] >> (4 * i)) & 15) << 4) | ((words[1] >> (4 * i)) & 15)
            codes = whole.to(tl.float16, bitcast=True)
    elif bits(FORM) == 4:
        # fields 0 and 1 are masked where they stand; 2 and 3 come down a byte first, into the mantissa's low bits
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
    """Return the codes of a field that is known at run time only, as code * 2**-24 whatever the field.

    Args:
        words, FORM, ASM: as for :func:`field`.
        i: the field, a scalar.
    """
    # a shift more than a constant mask; only parts of tiles take it
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

    Hierarchical codes step by the upper nibble; :func:`lift` holds the missing 1/16.

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
    """Load the stored parameters of tokens (axis ``token``), all groups of a token as one integer of 16 to 64 bits.

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
    """Return what :func:`of_tokens` loaded in the form in which a loop carries it: fp32 where a token has one group.

    Several groups stay packed in an integer until :func:`group_of`, which keeps registers free.
    """
    return meaning(FORM, stored[0], stored[1]) if CHANNEL_GROUPS == 1 else stored


@triton.jit
def group_of(stored, FORM: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, c: tl.constexpr):
    """Return :func:`meaning` of group `c` of the channels, from what :func:`ready` returned."""
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
        number: the group, counted from where the pointers stand.
        query: normalised query ``[D, R]``.
        alone: where `ONE_ROW`, the query's only row ``[D]``.
        ONE_ROW: the query has one row, so its bias is a sum over a vector.
    """
    at = tl.arange(0, KEY_DIM)
    stored = tl.load(PARTS[planes(FORM)] + number * KEY_DIM + at)
    _, least = meaning(FORM, stored, tl.load(PARTS[planes(FORM) + 1] + number * KEY_DIM + at))
    # the minima meet the query once a group, not once a token
    if ONE_ROW:
        bias = tl.sum(alone * least, 0)
    else:
        bias = tl.sum(query.to(tl.float32) * least[:, None], 0)
    return query * stored[:, None], bias
