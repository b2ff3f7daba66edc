"""Tensors of slot positions, which grow by a few tokens per step."""

from __future__ import annotations

import torch
from torch import Tensor


def extended(positions: Tensor, new: Tensor) -> Tensor:
    """Return positions ``[..., n]`` with new ones ``[..., q]`` behind them, in amortised O(q) like ``list.extend``.

    The result usually shares memory with `positions`: the new positions are written into spare room behind it. Shorter
    tensors in the same memory, such as those of a cloned cache, stay valid, because nothing before their end changes.
    Positions of two or more dimensions are copied after all. The caller must observe two rules, or it overwrites
    positions that another tensor shows:

    * If the same tensor is extended more than once, the appended positions must be the same each time.
    * A tensor that was shortened must be copied before it is extended.
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
