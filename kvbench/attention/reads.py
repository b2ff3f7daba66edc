"""The formats of segments as kernels read them, and which of them each attention kernel reads.

A list consists of :class:`kvbench.cache.kernels.reads.Reads`. A segment whose format is in no list is refused.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from kvbench.attention.rope.rotation_tables import NotServed
from kvbench.attention.work import Codebook, Format, Part, Work
from kvbench.cache.kernels.reads import COPIED, HALVES, HEAD, Reads, Rows, format_refusal
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment, fits_tiles
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

#: tokens in full precision
EXACT = Reads("full", (16,))
#: tokens of groups per channel, and channels of groups per token, that the CUDA kernel reads
_TOKENS = (16, 32, 64, 128)
_BOTH = {"channel": _TOKENS, "token": (*_TOKENS, HEAD)}
_ONE = {"token": (HEAD,)}
#: tokens that are packed at a time, where their groups cross the ends of tiles
_WINDOWS = range(16, 2048)
#: heads of 3-bit codes: the last bits of 32 channels are in one transfer
_HEADS_3 = (64, 96, 128, 256)

#: formats of keys that the CUDA kernel reads
CUDA_KEYS = Rows(
    (
        EXACT,
        Reads("affine", (2, 4, 8), _BOTH),
        Reads("affine", (3,), _BOTH, heads=_HEADS_3),
        Reads("affine", (2, 4, 8), {"channel": range(16, 256)}, windows=_WINDOWS),
        Reads("affine", (3,), {"channel": range(16, 256)}, heads=_HEADS_3, windows=_WINDOWS),
        Reads("atom", (2, 4), _BOTH),
        Reads("atom", (3,), _BOTH, heads=_HEADS_3),
        Reads("hierarchical", (8,), _BOTH),
        Reads("cross", (2, 4, 8), {"channel": (64, 128)}),
        Reads("cross", (3,), {"channel": (64, 128)}, heads=_HEADS_3),
        Reads("offset", (8,), _ONE, ("fp32",)),
        Reads("offset", (4, 8), {"token": (32,)}),
        Reads("folded", (4,), _ONE, ("fp32",)),
        Reads("float", (8,), _ONE, ("fp32", "")),
        Reads("float", (4,), {"token": (16,)}, ("e4m3",)),
        Reads("levels", (4,), _ONE),
        Reads("levels", (3,), _ONE, heads=_HEADS_3),
        Reads("levels_read", (4,), _ONE),
        Reads("levels_read", (3,), _ONE, heads=_HEADS_3),
        Reads("iq4_nl", (4,), {"token": (32,)}),
        Reads("octave", (4,), {"token": (64, HEAD)}),
        Reads("octave", (3,), {"token": (64, HEAD)}, heads=_HEADS_3),
    )
)
#: formats of values that the CUDA kernel reads: of the same kinds those per token, without levels
CUDA_VALUES = Rows(
    (
        EXACT,
        *(
            Reads(row.kind, row.bits, {"token": row.groups["token"]}, row.scales, row.heads)
            for row in CUDA_KEYS
            if "token" in row.groups and not row.kind.startswith("levels")
        ),
        Reads("cross", (2, 4, 8), _ONE),
        Reads("cross", (3,), _ONE, heads=_HEADS_3),
    )
)

_GROUPS = (32, 64, 128)
#: formats of keys, and of values, that the Triton kernel reads
TRITON_KEYS = Rows(
    (
        EXACT,
        Reads("affine", (2, 4, 8), {"channel": _GROUPS, "token": _GROUPS}),
        Reads("affine", (2, 4, 8), {"channel": range(16, 256)}, windows=_WINDOWS),
        Reads("atom", (2, 4), {"channel": _GROUPS, "token": _GROUPS}),
        Reads("hierarchical", (8,), {"channel": _GROUPS, "token": _GROUPS}),
    )
)
TRITON_VALUES = Rows(
    (
        EXACT,
        *(Reads(row.kind, row.bits, {"token": _GROUPS}) for row in TRITON_KEYS if "token" in row.groups),
    )
)

_ANY_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE = ("fp16", "fp32")
#: formats of keys that the CPU kernel reads
CPU_KEYS = Rows(
    (
        Reads("full", (16,)),
        Reads("affine", _ANY_BITS, _BOTH, _AFFINE),
        Reads("affine", _ANY_BITS, {"channel": range(16, 256)}, _AFFINE, windows=_WINDOWS),
        Reads("atom", _ANY_BITS, _BOTH, _AFFINE),
        Reads("hierarchical", (8,), _BOTH, _AFFINE),
        Reads("cross", (2, 3, 4, 8), {"channel": (64, 128)}, _AFFINE),
        Reads("offset", (8,), _ONE, ("fp32",)),
        Reads("offset", (4, 8), {"token": (32,)}),
        Reads("folded", (4,), _ONE, ("fp32",)),
        Reads("float", (8,), _ONE, ("fp32", "")),
        Reads("float", (4,), {"token": (16,)}, ("e4m3",)),
        Reads("levels", (3, 4), _ONE),
        Reads("levels_read", (3, 4), _ONE),
        Reads("iq4_nl", (4,), {"token": (32,)}),
        Reads("octave", (3, 4), {"token": (64, HEAD)}),
    )
)
#: formats of values that the CPU kernel reads: of the same kinds those per token, without levels, and tables of 4 bits
CPU_VALUES = Rows(
    (
        EXACT,
        *(
            Reads(row.kind, row.bits, {"token": row.groups["token"]}, row.scales)
            for row in CPU_KEYS
            if "token" in row.groups and not row.kind.startswith(("levels", "octave"))
        ),
        Reads("octave", (4,), {"token": (64, HEAD)}),
        Reads("cross", (2, 3, 4, 8), _ONE, _AFFINE),
    )
)

#: formats that the kernels for codebooks read (KVQuant): of keys, and of values
LOOKED_UP_KEYS = Rows((EXACT, Reads("codebook", (2, 3, 4), {"channel": (HEAD,)})))
LOOKED_UP_VALUES = Rows((EXACT, Reads("codebook", (2, 3, 4), {"token": (HEAD,)})))

#: formats that the kernels that return attention weights read
OBSERVED = Rows((EXACT,))

#: formats that at least one kernel reads, of keys or of values
ANY = Rows(
    (
        *(*CUDA_KEYS, *CUDA_VALUES, *TRITON_KEYS, *TRITON_VALUES),
        *(*LOOKED_UP_KEYS, *LOOKED_UP_VALUES, *CPU_KEYS, *CPU_VALUES),
    )
)

#: largest number of (sequence, KV head) pairs: CUDA's limit on the later dimensions of a grid
LINES = 65535


def unread(rows: Rows, form: Format, channels: int) -> str | None:
    """Return how a format differs from those that a kernel reads, or None if it is in the kernel's list."""
    return format_refusal(rows, form.kind, form.bits, form.axis, form.group, channels, form.scale, form.window)


def misfit(
    query: Tensor, work: Work, heads: Container[int], keys: Rows, values: Rows, *, widening: bool = False
) -> str | None:
    """Return why a kernel cannot serve a step according to its lists of formats, or None if they allow the step.

    Args:
        heads: channels of a head that the kernel takes.
        widening: True if the kernel computes in fp32 whatever it reads, so that queries and what is stored in full
            precision may each have 16 or 32 bits. False if both must be of the same 16-bit dtype.
    """
    if query.dtype not in (COPIED if widening else HALVES):
        return f"queries in {_name(query.dtype)}"
    for channels in (work.key_dim, work.value_dim):
        if channels not in heads:
            return f"heads of {channels} channels"
    if query.shape[0] * work.heads > LINES:
        return f"{query.shape[0]} rows of {work.heads} heads, more than {LINES} in all"
    for pair in work.phases:
        for side, part, rows, channels in (
            ("keys", pair[0], keys, work.key_dim),
            ("values", pair[1], values, work.value_dim),
        ):
            if part.buffer is None:
                reason = unread(rows, part.format, channels)
                if reason:
                    return f"{side} in {reason}"
            elif part.buffer.dtype != query.dtype and not widening:
                return f"queries in {_name(query.dtype)}, but {side} in {_name(part.buffer.dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: kinds of codes (:attr:`Format.kind`) that kernels decode
READ = {row.kind for row in ANY}
#: kinds of the codes of quantizers that do not name their own; not valid for subclasses, whose arithmetic may differ
KINDS = {AffineQuantizer: "affine", WindowedQuantizer: "affine", AtomQuantizer: "atom"}
#: :attr:`Format.scale` of parameters, by their dtype; e4m3 is stored as bytes
SCALES = {torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "e4m3"}
#: longest window, and longest group of a window, that fit into the integer by which a kernel gets a format
#: (:func:`kvbench.attention.triton.codes.format_number`)
WIDEST, LONGEST = 2047, 255


def describe_part(segment: Segment, channels: int, upper: bool = False) -> Part:
    """Describe a segment's buffers and format for a kernel.

    Args:
        channels: number of channels of a head, which is also the group size of a quantizer with ``group_size=None``.
        upper: True to read only the upper nibble of QuantSpec's 8-bit codes, as QuantSpec's drafts do.

    Raises:
        NotServed: no kernel reads the segment's format; only the reference path does.
    """
    if isinstance(segment, FullSegment):
        if segment.dtype not in COPIED:
            raise NotServed(f"no kernel reads keys and values in {str(segment.dtype).removeprefix('torch.')}")
        return Part(Format("full", 16), buffer=segment.buffer)
    if isinstance(segment, NuqSegment):
        return looked_up(segment)
    if not isinstance(segment, PackedSegment):
        raise NotServed(f"no kernel reads the tokens of a {type(segment).__name__}")
    quantizer = segment.quantizer
    kind, window = kind_of(quantizer), window_of(quantizer)
    group = quantizer.group_size or channels
    padding = segment.parameters[0].padding if segment.parameters else 0
    form = Format(kind, quantizer.bits, quantizer.axis, group, window, scale_of(segment), padding)
    reason = unread(ANY, form, channels)
    if reason:
        raise NotServed(f"no kernel reads {reason}")
    if kind == "hierarchical" and upper:
        return Part(Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    factor = float(getattr(quantizer, "factor", 1.0)) if kind in ("float", "octave") else 1.0
    return Part(form, segment.words, segment.params, factor=factor)


def scale_of(segment: PackedSegment) -> str:
    """Return the :attr:`Format.scale` of a segment.

    Raises:
        NotServed: no kernel reads parameters of this dtype.
    """
    dtypes = {param.dtype for param in segment.params}
    if not dtypes:
        return ""
    if len(dtypes) > 1 or not dtypes <= set(SCALES):
        raise NotServed(f"no kernel reads parameters in {' and '.join(sorted(str(d).split('.')[1] for d in dtypes))}")
    return SCALES[dtypes.pop()]


def looked_up(segment: NuqSegment) -> Part:
    """Describe the buffers of a segment with KVQuant's codes for a kernel."""
    levels, scale, offset, stand_in = segment.lookup()
    axis = "token" if segment.thresholds is None else "channel"
    book = Codebook(levels, scale, offset, stand_in, segment.exact)
    return Part(Format("codebook", segment.bits, axis, scale=SCALES[scale.dtype]), segment.words, codebook=book)


def kind_of(quantizer: AffineQuantizer) -> str:
    """Return the :attr:`Format.kind` of the codes of a quantizer.

    Raises:
        NotServed: no kernel reads the codes of this class of quantizers.
    """
    kind = getattr(quantizer, "kind", None) or KINDS.get(type(quantizer))
    if kind not in READ:
        raise NotServed(f"no kernel reads the codes of a {type(quantizer).__name__}")
    return kind


def window_of(quantizer: AffineQuantizer) -> int:
    """Return the :attr:`Format.window` of a quantizer, which is 0 unless its groups may cross tile boundaries.

    Raises:
        NotServed: groups are smaller than the run of consecutive tokens that a tile stores in the same bits of its
            words, so such a run may belong to more than two groups; or the window has more than :data:`WIDEST` tokens,
            or a group more than :data:`LONGEST`, which kernels cannot encode.
    """
    if not isinstance(quantizer, WindowedQuantizer) or fits_tiles(quantizer):
        return 0
    window, groups = quantizer.window, quantizer.groups
    field = TILE * min(quantizer.bits, 4) // 16
    if window // groups < field:
        raise NotServed(f"no kernel reads groups of {window // groups} tokens; the minimum is {field}")
    longest = quantizer.group_size or window
    if window > WIDEST or longest > LONGEST:
        raise NotServed(f"no kernel reads windows of {window} tokens in groups of {longest}")
    return window
