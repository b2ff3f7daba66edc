"""Quantize and pack in one launch: what the host does (kernels: pack_kernel and pack_windows beside it, Triton).

Served are fp16 and bf16 tokens on a CUDA device of compute capability 8.0 or newer in codes of 2, 4 and 8 bits, affine,
hierarchical or Atom's, in groups of a power of two, and windows of any length (LogQuant's W = 42) in groups of 8 to 64
tokens. Three bits, other groups and fp32 take torch's way (`PackedSegment.append`), with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.segments.layout import TILE
from kvbench.cache.watch import Watch, words
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.packing import PLANES
from kvbench.quantizers.windowed import WindowedQuantizer

if TYPE_CHECKING:
    from kvbench.cache.segments.packed import PackedSegment

#: class of a quantizer -> name of its arithmetic; subclasses have arithmetic of their own
KINDS = {
    AffineQuantizer: "affine",
    WindowedQuantizer: "affine",
    HierarchicalQuantizer: "hierarchical",
    AtomQuantizer: "atom",
}
#: elements of a program
ELEMENTS = 8192
#: whether tensors on a CPU are packed by Triton's interpreter where that is on: set by the kernel's own tests alone
INTERPRET = False


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for, beside the dtype.

    Args:
        kind, bits, by_channel, group: of the quantizer.
        rows, channels: word rows and channels of a program.
        parts: programs of a tile.
        warps: of a program. Threads along the tokens of a group each work out its parameters, so fewer warps do less
            work in all, and more hide latency better.
        window: tokens of a block whose groups, of at most `group` tokens, do not fit tiles; 0: they do.
    """

    kind: str
    bits: int
    by_channel: bool
    group: int
    rows: int
    channels: int
    parts: int
    warps: int = 2
    window: int = 0


@lru_cache(maxsize=256)
def form(kind: str, bits: int, by_channel: bool, group: int, channels: int, half: bool) -> Form | str:
    """How the kernel serves a format for heads of `channels`, or why it does not; `half`: fp16, else bf16."""
    if bits not in (2, 4, 8):
        return f"{bits}-bit codes"
    if group & (group - 1) or not 8 <= group <= TILE:
        return f"groups of {group}"
    all_rows = word_rows(bits)
    if by_channel:
        rows = all_rows
        wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    else:
        wide = max((w for w in (group, 32, 64, 128) if w >= group and channels % w == 0), default=0)
        rows = min(all_rows, max(ELEMENTS * all_rows // (TILE * wide), 1)) if wide else 0
    if not wide:
        return f"heads of {channels} channels"
    # as many as compile for sm_90 without spilling registers
    if kind == "hierarchical" or (not half and (group <= 32 or not by_channel)):
        warps = 4
    else:
        warps = 1 if by_channel and group <= rows and half else 2
    return Form(kind, bits, by_channel, group, rows, wide, all_rows // rows * (channels // wide), warps)


@lru_cache(maxsize=256)
def windows(bits: int, window: int, group: int, channels: int, half: bool) -> Form | str:
    """As :func:`form`, for blocks of `window` tokens that are cut into groups of at most `group`, wherever they lie."""
    if bits not in (2, 4, 8):
        return f"{bits}-bit codes"
    least = window // -(-window // group)
    if not 8 <= least <= group <= 64:
        return f"windows of {window} tokens in groups of {least} to {group}"
    wide = max((w for w in (16, 32, 64) if channels % w == 0), default=0)
    if not wide:
        return f"heads of {channels} channels"
    # compiled for sm_90, two warps of 64 channels spill no register for W = 42 (a few words for some other windows)
    return Form("affine", bits, True, group, word_rows(bits), wide, channels // wide, 2, window)


def programs(how: Form, start: int, count: int) -> tuple[Form, int, int]:
    """The programs of a (row, KV head) that write tokens ``[start, start + count)``.

    A token alone with groups of its own (the value that leaves a window at every step) touches one word row, so one
    program of a small kind writes it, instead of all that a tile has.

    Returns:
        How a tile is cut, the first of its programs that is needed, and how many are.
    """
    if count == 1 and not how.by_channel:
        one = alone_in_its_row(how)
        across = one.parts * one.rows // word_rows(how.bits)
        return one, start % TILE % word_rows(how.bits) * across, across
    tiles = -(-(start + count) // TILE) - start // TILE
    return how, 0, max(tiles, 1) * how.parts


@lru_cache(maxsize=256)
def alone_in_its_row(how: Form) -> Form:
    """The form whose programs have a single word row."""
    return replace(how, rows=1, parts=how.parts * how.rows, warps=1)


def word_rows(bits: int) -> int:
    """Word rows of a tile."""
    return TILE * max(PLANES[bits]) // 16


@cache
def missing() -> str | None:
    """Why the kernel cannot run here at all, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


@cache
def _interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, operation by operation (TRITON_INTERPRET=1: tests)."""
    if missing():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _too_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


@cache
def compiled(device: torch.device) -> bool:
    """Whether kernels are compiled for `device`."""
    return device.type == "cuda" and missing() is None and not _too_old(device) and not _interpreted()


def served(segment: PackedSegment, x: Tensor) -> Form | str:
    """The form in which the kernel packs tokens ``x`` ``[rows, H, n, D]`` into `segment`, or why it does not."""
    if x.dtype not in (torch.float16, torch.bfloat16) or segment.dtype == torch.float32:
        return f"tokens in {str(x.dtype).removeprefix('torch.')}"
    reason = missing()
    if reason is not None:
        return reason
    if x.device.type != "cuda" and not (INTERPRET and _interpreted()):
        return f"tensors on {x.device.type}"
    if x.device.type == "cuda" and (_too_old(x.device) or _interpreted()):
        return "a GPU older than compute capability 8.0, or TRITON_INTERPRET=1"
    quantizer = segment.quantizer
    kind = KINDS.get(type(quantizer))
    if kind is None:
        return f"codes of {type(quantizer).__name__}"
    channels, half = x.shape[-1], x.dtype == torch.float16
    group = quantizer.group_size or channels
    if isinstance(quantizer, WindowedQuantizer) and (group & (group - 1) or not quantizer.even):
        found = windows(quantizer.bits, quantizer.window, group, channels, half)
    else:
        found = form(kind, quantizer.bits, quantizer.axis == "channel", group, channels, half)
    if isinstance(found, Form) and any(s % 2 for s in x.stride()[:-1]) | (x.stride(-1) != 1) | (x.data_ptr() % 4 != 0):
        return "channels that are not contiguous"
    return found


def pack(segment: PackedSegment, how: Form, first_row: int, x: Tensor, start: int, index: Tensor | None = None) -> None:
    """Encode tokens into ``[start, start + n)`` of rows ``first_row, ...`` of `segment`, whose buffers have room.

    Args:
        how: from :func:`served`.
        x: ``[rows, H, n, D]``, or any number of tokens where `index` is given.
        index: which tokens of `x` to take, in this order (int64 or int32 ``[n]``, on the device of `x`).
    """
    from kvbench.cache.kernels import pack_together

    if index is None and pack_together.collected(segment, how, first_row, x, start):
        return
    count = x.shape[2] if index is None else len(index)
    if count:
        _launch(segment, how, first_row, x, start, count, index)
        if segment.watch is None:
            alone(x.device)[0].check()


def warm(segment: PackedSegment, x: Tensor) -> None:
    """Have the kernels compiled by which tokens like ``x`` ``[B, H, 1, D]`` are packed later; nothing is packed now.

    A compilation takes a second: it should not fall into the step of the first flush.
    """
    from kvbench.cache.kernels import pack_together

    how = served(segment, x)
    if isinstance(how, Form):
        for each in {how, programs(how, 0, 1)[0]}:
            _launch(segment, each, 0, x, 0, 0, None)
            if segment.watch is not None:
                pack_together.run([pack_together.Job(segment, each, 0, x[:, :, :0], 0)])


def _launch(
    segment: PackedSegment, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None
) -> None:
    from kvbench.cache.kernels.pack_kernel import pack_tiles
    from kvbench.cache.kernels.pack_windows import pack_windows

    rows, heads, _, channels = x.shape
    watch, tag = segment.watch or alone(x.device)
    how, first, parts = programs(how, start, count)
    value = segment.side == "value"
    tiled = (how.kind, how.bits, how.by_channel, how.group, channels, value, how.rows, how.channels)
    windowed = (how.bits, how.window, how.group, channels, value, how.channels)
    with torch.cuda.device_of(x):
        (pack_windows if how.window else pack_tiles)[(rows * heads, parts)](
            x,
            x if index is None else index,
            segment.words[0],
            segment.words[-1],
            segment.params[0],
            segment.params[1],
            watch.record,
            x.stride(0) // 2,
            x.stride(1) // 2,
            x.stride(2) // 2,
            start,
            count,
            first_row,
            first,
            heads,
            segment.words[0].shape[2],
            segment.params[0].shape[2],
            tag,
            *(windowed if how.window else tiled),
            index is not None,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )


@lru_cache(maxsize=16)
def alone(device: torch.device) -> tuple[Watch, int]:
    """The watch of segments that belong to no layer: it is read after every call."""
    watch = Watch(device)
    return watch, watch.tag(words)
