"""Appending new keys and values to a layer's buffers, at positions that the device reads from memory.

An eager step does not need this module, because the host knows where its tokens go (`FullSegment.append`). A captured
step (recorded as a CUDA graph) is replayed with the arguments of the recording, so these positions must be in device
memory. New tokens always go to the *tail*, the last segment of a store, which is in full precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.kernels.reads import uncopied


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
    from kvbench.cache.kernels.append_kernel import write_new_tokens

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
