"""Quantization and packing of tokens on a CPU: the Python side, which prepares and calls the kernel.

The C++ (`pack.cpp`, in the library of :mod:`kvbench.attention.cpu.build`) writes the bits of torch's quantizers: in
a decode step in a hundredth of the time that a token takes there. Formats that it does not serve are packed by torch
(:meth:`kvbench.cache.segments.packed.PackedSegment.append`).
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvbench.attention.cpu import build
from kvbench.attention.cpu.decode import KINDS, TYPES
from kvbench.cache.kernels.pack import KINDS as NAMES
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers.windowed import WindowedQuantizer

#: heads, and groups of channels, are multiples of this number, the lanes of the widest vectors; most channels of a head
LANES, MOST_CHANNELS = 16, 1024


class PackingStruct(Structure):
    """The struct ``Packing`` of `pack.cpp`."""

    _fields_ = (
        ("words", c_void_p * 2),
        ("params", c_void_p * 2),
        ("tokens", c_void_p),
        ("stride", c_int64 * 3),
        ("param_head", c_int64),
        ("kind", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("channels", c_int32),
        ("heads", c_int32),
        ("tiles", c_int32),
        ("by_token", c_int32),
        ("window", c_int32),
        ("cuts", c_int32),
        ("keys", c_int32),
        ("type", c_int32),
        ("row", c_int32),
        ("rows", c_int32),
        ("start", c_int32),
        ("count", c_int32),
        ("threads", c_int32),
        ("parallel", c_void_p),
    )


def pack_tokens(segment: PackedSegment, row: int, x: Tensor, start: int, instructions: str | None = None) -> bool:
    """Quantize tokens and write their codes and parameters into a segment's buffers, which must have room for them.

    Args:
        row: row of the batch, in the segment, to which row 0 of `x` belongs.
        x: tokens in full precision, ``[rows, H, n, D]``.
        start: index of the first token to write within the segment.
        instructions: as for :func:`kvbench.attention.cpu.decode.attend`, and the same whenever the segment is packed.

    Returns:
        False if torch must pack them instead: the format or dtype is not served, or a token has no finite scale.
    """
    known = segment.prepared
    if known is None or known[0] is not segment.words:  # the buffers have grown, or the batch has changed
        known = segment.prepared = (segment.words, described(segment), build.kernel_library(instructions))
    _, struct, library = known
    if struct is None or isinstance(library, str) or x.dtype != segment.dtype or x.stride(3) != 1:
        return False
    if x.shape[2] % segment.quantizer.block_tokens:  # an incomplete group, at which the quantizer raises
        return False
    struct.tokens, struct.stride = x.data_ptr(), (*x.stride()[:3],)
    struct.row, struct.rows, struct.start, struct.count = row, x.shape[0], start, x.shape[2]
    struct.threads, struct.parallel = torch.get_num_threads(), library.parallel
    return library.pack(ctypes.byref(struct)) == 0


def described(segment: PackedSegment) -> PackingStruct | None:
    """Return the struct of a segment's buffers and format; None if the format is not served."""
    quantizer, channels = segment.quantizer, segment.channels
    kind, group = NAMES.get(type(quantizer)), quantizer.group_size or segment.channels
    served = (
        kind in ("affine", "atom")
        and segment.device.type == "cpu"
        and segment.dtype in (torch.bfloat16, torch.float32)
        and (channels if quantizer.axis == "channel" else group) % LANES == 0
        and channels <= MOST_CHANNELS
    )
    if not served:
        return None
    assert kind is not None
    return PackingStruct(
        words=(c_void_p * 2)(*(words.data_ptr() for words in segment.words)),
        params=(c_void_p * 2)(*(param.data_ptr() for param in segment.params)),
        param_head=segment.params[0].stride(1),
        kind=KINDS[kind],
        bits=quantizer.bits,
        group=group,
        channels=channels,
        heads=segment.heads,
        tiles=segment.capacity // TILE,
        by_token=quantizer.axis == "token",
        window=quantizer.window if isinstance(quantizer, WindowedQuantizer) else 0,
        cuts=quantizer.groups if isinstance(quantizer, WindowedQuantizer) else 1,
        keys=segment.side == "key",
        type=TYPES[segment.dtype],
    )
