"""New keys and values of a captured step into the tails, at places that stand in device memory.

An eager step knows on the host where its tokens go (`FullSegment.append`). A captured one is replayed with the
addresses that it was captured with, so where a token goes must be read on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def append(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, places: Tensor) -> None:
    """Write the tokens of a step into the buffers of two tails, in one launch.

    Args:
        keys, values: ``[B, H, q, D]`` and ``[B, H, q, Dv]``.
        key_buffer, value_buffer: ``[B, H, capacity, D]`` and ``[B, H, capacity, Dv]``, contiguous.
        places: int32 ``[B, 2]``: where the first token's key and value of each row go.
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
