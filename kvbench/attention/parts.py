"""The formats of segments as kernels read them; a segment that no kernel reads is refused."""

from __future__ import annotations

import torch

from kvbench.attention.rope.tables import NotServed
from kvbench.attention.work import FACTORED, Codebook, Format, Part
from kvbench.cache.segments.base import FullSegment, Segment
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment, fits_tiles
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.packing import PLANES
from kvbench.quantizers.windowed import WindowedQuantizer

#: tokens (axis ``channel``) or channels (axis ``token``) of a group that kernels are written for
GROUPS = (16, 32, 64, 128)
#: kinds of codes (:attr:`Format.kind`) that kernels decode
READ = ("affine", "atom", "hierarchical", "offset", "folded", "float", "cross", "levels", "levels_read")
#: :attr:`Format.scale` of parameters, by their dtype; e4m3 is stored as bytes
SCALES = {torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "e4m3"}
#: longest window, and longest group of a window, that fit into the integer by which a kernel gets a format
#: (:func:`kvbench.attention.triton.codes.number`)
WIDEST, LONGEST = 2047, 255


def part(segment: Segment, channels: int, upper: bool = False) -> Part:
    """Describe a segment's buffers and format for a kernel.

    Args:
        segment: segment of keys or of values.
        channels: number of channels of a head, which is also the group size of a quantizer with ``group_size=None``.
        upper: True to read only the upper nibble of QuantSpec's 8-bit codes, as QuantSpec's drafts do.

    Raises:
        NotServed: no kernel reads the segment's format; only the reference path does.
    """
    if isinstance(segment, FullSegment):
        if segment.dtype not in (torch.float16, torch.bfloat16):
            raise NotServed(f"no kernel reads keys and values in {str(segment.dtype).removeprefix('torch.')}")
        return Part(Format("full", 16), buffer=segment.buffer)
    if isinstance(segment, NuqSegment):
        return looked_up(segment)
    if not isinstance(segment, PackedSegment):
        raise NotServed(f"no kernel reads the tokens of a {type(segment).__name__}")
    quantizer = segment.quantizer
    kind, window = kind_of(quantizer), window_of(quantizer)
    group = quantizer.group_size or channels
    if quantizer.bits not in PLANES or (quantizer.bits == 8 and kind == "atom"):
        raise NotServed(f"no kernel reads {quantizer.bits}-bit codes")
    if group not in GROUPS and not window and not (quantizer.axis == "token" and group == channels):
        raise NotServed(f"no kernel reads groups of {group}")
    if kind == "hierarchical" and upper:
        return Part(Format("affine", 4, quantizer.axis, group), segment.words[:1], segment.params)
    scale = scale_of(segment, kind)
    factor = float(getattr(quantizer, "factor", 1.0)) if kind == "float" else 1.0
    form = Format(kind, quantizer.bits, quantizer.axis, group, window, scale)
    return Part(form, segment.words, segment.params, factor=factor)


def scale_of(segment: PackedSegment, kind: str) -> str:
    """Return the :attr:`Format.scale` of a segment.

    Args:
        segment: packed segment of keys or of values.
        kind: :attr:`Format.kind` of its codes.

    Raises:
        NotServed: no kernel reads parameters of this dtype.
    """
    dtypes = {param.dtype for param in segment.params}
    if not dtypes:
        return ""
    if len(dtypes) > 1 or not dtypes <= set(SCALES):
        raise NotServed(f"no kernel reads parameters in {' and '.join(sorted(str(d).split('.')[1] for d in dtypes))}")
    scale = SCALES[dtypes.pop()]
    if scale != "fp16" and kind not in FACTORED:
        raise NotServed(f"no kernel reads scales in {scale}")
    return scale


def looked_up(segment: NuqSegment) -> Part:
    """Describe the buffers of a segment with KVQuant's codes for a kernel.

    Args:
        segment: segment of keys or of values.

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

    Args:
        quantizer: quantizer of a packed segment.

    Raises:
        NotServed: no kernel reads the codes of this class of quantizers.
    """
    if isinstance(quantizer, WindowedQuantizer):
        return "affine"
    kind = getattr(quantizer, "kind", None) or {AffineQuantizer: "affine", AtomQuantizer: "atom"}.get(type(quantizer))
    if kind not in READ:
        raise NotServed(f"no kernel reads the codes of a {type(quantizer).__name__}")
    return kind


def window_of(quantizer: AffineQuantizer) -> int:
    """Return the :attr:`Format.window` of a quantizer, which is 0 unless its groups may cross tile boundaries.

    Args:
        quantizer: quantizer of a packed segment.

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
