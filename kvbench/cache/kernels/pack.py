"""Quantizing and packing in one launch: the host code (Triton kernels: ``pack_kernel`` and ``pack_windows``).

The kernels serve fp16 and bf16 tokens on CUDA devices of compute capability 8.0 or newer, in the formats of their lists
(:mod:`kvbench.cache.kernels.reads`). All else is packed with torch operations (`PackedSegment.append`), with the same
result, and the segment notes the reason.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvbench.cache.kernels import pack_together
from kvbench.cache.kernels.jobs import Form, Packed, packing_form, plan, programs, windows
from kvbench.cache.kernels.jobs import alone as alone
from kvbench.cache.kernels.pack_together import families, family
from kvbench.cache.kernels.reads import HALVES
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

#: class of a quantizer -> name of its arithmetic; not valid for subclasses, whose arithmetic may differ
KINDS = {
    AffineQuantizer: "affine",
    WindowedQuantizer: "affine",
    HierarchicalQuantizer: "hierarchical",
    AtomQuantizer: "atom",
}
#: True to pack tensors on a CPU in Triton's interpreter if that is enabled; set only by the kernel's own tests
INTERPRET = False


@cache
def missing() -> str | None:
    """Return the reason why no Triton kernel can run on this machine, or None if it can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


@cache
def _interpreted() -> bool:
    """Return True if Triton runs kernels on the CPU, operation by operation (TRITON_INTERPRET=1: tests)."""
    if missing():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _too_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


@cache
def compiled(device: torch.device) -> bool:
    """Return True if Triton kernels can be compiled for a device, and Triton's interpreter is off."""
    return device.type == "cuda" and missing() is None and not _too_old(device) and not _interpreted()


def considered(device: torch.device) -> bool:
    """Return True if kernels are tried first for tokens on a device; False if torch packs them in any case."""
    return device.type == "cuda" or (INTERPRET and _interpreted())


def served(segment: Packed, x: Tensor) -> Form | str:
    """Check whether a kernel, rather than torch operations, can pack tokens ``[rows, H, n, D]`` into a segment.

    Returns:
        The kernel's compile-time parameters if it can, else the reason why not, as text.
    """
    for dtype, what in ((x.dtype, "tokens"), (segment.dtype, "a cache")):
        if dtype not in HALVES:
            return f"{what} in {str(dtype).removeprefix('torch.')}"
    reason = missing()
    if reason is not None:
        return reason
    if not considered(x.device):
        return f"tensors on {x.device.type}"
    if x.device.type == "cuda" and (_too_old(x.device) or _interpreted()):
        return "a GPU older than compute capability 8.0, or TRITON_INTERPRET=1"
    quantizer = segment.quantizer
    kind, channels, half = KINDS.get(type(quantizer)), x.shape[-1], x.dtype == torch.float16
    group = quantizer.group_size or channels
    answer: Form | str
    if kind is None:
        answers = (module.kernel_form(quantizer, channels) for module in families())
        answer = next(filter(None, answers), f"codes of {type(quantizer).__name__}")
    elif isinstance(quantizer, WindowedQuantizer) and (group & (group - 1) or not quantizer.even):
        answer = windows(quantizer.bits, quantizer.window, group, channels, half)
    else:
        answer = packing_form(kind, quantizer.bits, quantizer.axis == "channel", group, channels, half)
    if isinstance(answer, Form) and any(s % 2 for s in x.stride()[:-1]) | (x.stride(-1) != 1) | (x.data_ptr() % 4 != 0):
        return "channels that are not contiguous"
    return answer


def pack(segment: Packed, how: Form, first_row: int, x: Tensor, start: int, index: Tensor | None = None) -> None:
    """Quantize tokens and write their codes and parameters into a segment's buffers, which must have room for them.

    In a ``with`` block of :func:`kvbench.cache.kernels.pack_together.packing_together`, this happens at the end of the
    block, unless `index` is given.

    Args:
        how: the kernel's compile-time parameters, as :func:`served` returned them.
        first_row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``.
        start: index of the first token to write within the segment.
        index: indices of the tokens of `x` to pack, in the order in which to write them, int64 or int32 ``[m]`` on the
            device of `x`; None for all.

    Raises:
        NonFiniteError: a token contains NaN or Inf, and the segment belongs to no cache. (In a cache, the error is
            raised later: :mod:`kvbench.cache.watch`.)
    """
    if index is None and pack_together.defer(segment, how, first_row, x, start):
        return
    count = x.shape[2] if index is None else len(index)
    if count:
        _launch_pack_tiles(segment, how, first_row, x, start, count, index)
        if segment.watch is None:
            alone(x.device)[0].check()


def warm_packing(segment: Packed, x: Tensor) -> None:
    """Compile the kernels that will pack tokens like ``x`` ``[B, H, 1, D]`` later, without packing any.

    Of `x`, only shape, strides, dtype and device matter. Compilation takes about a second, which would otherwise be
    part of the first step that packs.
    """
    how = served(segment, x)
    if isinstance(how, Form):
        for launched in {how, programs(how, 0, 1)[0]}:
            _launch_pack_tiles(segment, launched, 0, x, 0, 0, None)
            if segment.watch is not None:
                pack_together.pack_alike([pack_together.Job(segment, launched, 0, x[:, :, :0], 0)])
        if isinstance(segment.quantizer, WindowedQuantizer):
            pack_together.thin_windows([pack_together.Thin(x, (0, len(x)), 0, 0, 0)])


def _launch_pack_tiles(
    segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None
) -> None:
    from kvbench.cache.kernels.pack_kernel import pack_tiles
    from kvbench.cache.kernels.pack_windows import pack_windows

    own = family(how.kind)
    if own is not None:
        own.launch_pack(segment, how, first_row, x, start, count, index)
        return
    watch, tag = segment.watch or alone(x.device)
    how, grid, places = plan(segment, how, first_row, x, start, count, unit=2)
    channels, value = x.shape[-1], segment.side == "value"
    tiled = (how.kind, how.bits, how.by_channel, how.group, channels, value, how.rows, how.channels)
    windowed = (how.bits, how.window, how.group, channels, value, how.channels)
    with torch.cuda.device_of(x):
        (pack_windows if how.window else pack_tiles)[grid](
            x,
            x if index is None else index,
            segment.words[0],
            segment.words[-1],
            segment.params[0],
            segment.params[1],
            watch.record,
            *places,
            segment.params[0].shape[2],
            tag,
            *(windowed if how.window else tiled),
            index is not None,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )
