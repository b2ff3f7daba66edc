"""The formats of segments as kernels read them; a segment that no kernel reads is refused."""

from __future__ import annotations

import torch

from kvbench.attention.reads import ANY, unread
from kvbench.attention.rope.tables import NotServed
from kvbench.attention.work import Codebook, Format, Part
from kvbench.cache.kernels.reads import COPIED
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment, fits_tiles
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

#: kinds of codes (:attr:`Format.kind`) that kernels decode
READ = {row.kind for row in ANY}
#: kinds of the codes of quantizers that do not name their own; not valid for subclasses, whose arithmetic may differ
KINDS = {AffineQuantizer: "affine", WindowedQuantizer: "affine", AtomQuantizer: "atom"}
#: :attr:`Format.scale` of parameters, by their dtype; e4m3 is stored as bytes
SCALES = {torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "e4m3"}
#: longest window, and longest group of a window, that fit into the integer by which a kernel gets a format
#: (:func:`kvbench.attention.triton.codes.number`)
WIDEST, LONGEST = 2047, 255


def part(segment: Segment, channels: int, upper: bool = False) -> Part:
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
    form = Format(kind, quantizer.bits, quantizer.axis, group, window, scale_of(segment))
    reason = unread(ANY, form, channels)
    if reason:
        raise NotServed(f"no kernel reads {reason}")
    if kind == "hierarchical" and upper:
        return Part(Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    factor = float(getattr(quantizer, "factor", 1.0)) if kind == "float" else 1.0
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
    """Describe the buffers of a segment with KVQuant's codes for a kernel.

    Raises:
        NotServed: ranges of values are fp32.
    """
    if any(param.dtype != torch.float16 for param in segment.params):
        raise NotServed("no kernel reads scales in fp32")
    levels, scale, offset, stand_in = segment.lookup()
    axis = "token" if segment.thresholds is None else "channel"
    book = Codebook(levels, scale, offset, stand_in, segment.exact)
    return Part(Format("codebook", segment.bits, axis), segment.words, codebook=book)


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
