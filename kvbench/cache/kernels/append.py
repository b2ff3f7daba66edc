"""Appending the keys and values of a captured step to the tails, at positions read from device memory.

In an eager step the host knows where the tokens go (`FullSegment.append`). A captured step (CUDA graph) is replayed
with the arguments that it was captured with, so the device must read from memory where the tokens go.
"""

from __future__ import annotations

import torch
from torch import Tensor


def append(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, places: Tensor) -> None:
    """Write the new tokens of a captured step into the buffers of a layer's two tails, in one launch.

    Args:
        keys: keys of the new tokens, ``[B, H, q, D]``.
        values: values of the new tokens, ``[B, H, q, Dv]``.
        key_buffer: buffer of the keys' tail, ``[B, H, capacity, D]``, contiguous.
        value_buffer: buffer of the values' tail, ``[B, H, capacity, Dv]``, contiguous.
        places: for each row, the buffer index of its first new key and that of its first new value, int32 ``[B, 2]``.
    """
    if not keys.is_cuda:
        count = keys.shape[2]
        for row, (key, value) in enumerate(places.tolist()):
            key_buffer[row, :, key : key + count].copy_(keys[row])
            value_buffer[row, :, value : value + count].copy_(values[row])
        return
    from kvbench.cache.kernels.append_kernel import write

    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    batch, heads, count, channels = keys.shape
    with torch.cuda.device_of(keys):
        write[(batch * heads, count, 2)](
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
