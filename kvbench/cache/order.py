"""Tensors of slot positions, which grow by a few tokens per step."""

from __future__ import annotations

import torch
from torch import Tensor


def extended(positions: Tensor, new: Tensor) -> Tensor:
    """Append positions to a tensor of positions, mostly without copying it.

    The argument and the result share a buffer with spare room at its end, so that appending q positions takes amortised
    O(q) time. Older tensors over the same buffer (in a clone of the cache) stay valid, because only memory beyond their
    end is written. Two rules follow for the caller. If the same tensor is extended more than once, the appended
    positions must be the same each time. A tensor that was shortened must be copied before it is extended.

    Args:
        positions: the present positions, ``[..., n]``. A tensor of two or more dimensions is copied.
        new: the positions to append, ``[..., q]``.

    Returns:
        ``[..., n + q]``.
    """
    length, count = positions.shape[-1], new.shape[-1]
    if positions.ndim > 1 or positions.dtype != new.dtype:
        return torch.cat([positions, new], -1)
    room = positions.untyped_storage().nbytes() // positions.element_size() - positions.storage_offset()
    if length + count > room or positions.stride() != (1,):
        with torch.inference_mode(False):  # steps may run inside and outside of inference mode
            buffer = positions.new_empty(length + count + max(length // 2, 256))
        buffer[:length] = positions
        positions = buffer[:length]
    grown = positions.as_strided((length + count,), (1,))
    grown[length:] = new
    return grown
