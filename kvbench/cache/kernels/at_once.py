"""Storage of a captured step's new tokens: they are appended to a layer's buffers, or packed before they attend.

They are appended at positions that the device reads from memory, and packed by the kernel of their segments.

An eager step does not need this module, because the host knows where its tokens go (`FullSegment.append`). A captured
step (recorded as a CUDA graph) is replayed with the arguments of the recording, so these positions must be in device
memory. New tokens always go to the *tail*, the last segment of a store, which is in full precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.kernels import engine, nuq
from kvbench.cache.kernels.reads import uncopied
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import PackedSegment


def append(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, places: Tensor) -> None:
    """Write the keys and values of new tokens into a layer's buffers, in one launch that a CUDA graph can replay.

    Args:
        keys: ``[B, H, q, D]``.
        values: ``[B, H, q, Dv]``.
        key_buffer: buffer that receives the keys, ``[B, H, capacity, D]``, contiguous.
        value_buffer: buffer that receives the values, ``[B, H, capacity, Dv]``, contiguous.
        places: where to write: for each row, the index along `capacity` of its first new key and that of its first new
            value, int32 ``[B, 2]``. The kernel reads it on the device, so it can change from one replay to the next.
    """
    sides = list(zip((keys, values), (key_buffer, value_buffer), places.unbind(1), strict=True))
    if not keys.is_cuda or any(uncopied(x.dtype) or x.dtype != buffer.dtype for x, buffer, _ in sides):
        rows, new = (torch.arange(size, device=places.device) for size in keys.shape[:3:2])
        for x, buffer, first in sides:
            buffer[rows[:, None], :, first[:, None] + new] = x.transpose(1, 2).to(buffer.dtype)
        return
    from kvbench.cache.kernels.exact_kernels import write_new_tokens

    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    batch, heads, count, channels = keys.shape
    with torch.cuda.device_of(keys):
        write_new_tokens[(batch * heads, count, 2)](
            keys,
            values,
            key_buffer,
            value_buffer,
            places,
            *keys.stride()[:3],
            *values.stride()[:3],
            heads,
            key_buffer.shape[2],
            value_buffer.shape[2],
            channels,
            values.shape[3],
            num_warps=1,
        )


#: segments of the keys and of the values of a layer, for both of which one kernel packs a token
PackedAtOnce = tuple[NuqSegment, NuqSegment] | tuple[PackedSegment, PackedSegment]


def packing_refusal(segments: PackedAtOnce) -> str | None:
    """Return why no kernel can pack new tokens on the device, or None if one can."""
    keys, values = segments
    if isinstance(keys, PackedSegment) and isinstance(values, PackedSegment):
        return engine.engine_refusal(keys, values)
    assert isinstance(keys, NuqSegment) and isinstance(values, NuqSegment)
    return nuq.nuq_refusal(keys, values)


def pack_new_tokens(segments: PackedAtOnce, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Pack the key and the value of one new token per row, in one launch that can be recorded.

    The host must have made room for them (``advance`` of each segment).

    Args:
        key: keys of the new tokens as the segment stores them, ``[B, H, 1, D]``.
        value: values of the new tokens, ``[B, H, 1, Dv]``.
        places: index of the token in each segment, int32 ``[B, 2]``, read on the device; negative to store nothing.
    """
    keys, values = segments
    if isinstance(keys, PackedSegment) and isinstance(values, PackedSegment):
        engine.pack_engine_tokens(keys, values, key, value, places)
    else:
        assert isinstance(keys, NuqSegment) and isinstance(values, NuqSegment)
        nuq.pack_nuq_tokens(keys, values, key, value, places)
