"""Positions of the slots of a row that grow by a few tokens a step."""

from __future__ import annotations

import torch
from torch import Tensor


def extended(positions: Tensor, new: Tensor) -> Tensor:
    """Return `positions` ``[..., n]`` followed by `new` ``[..., q]``, in amortised constant time if they are ``[n]``.

    The tensors that come and go share a buffer with room at its end, so a step of a long sequence copies nothing.
    Whoever holds an older one (a clone of the cache) sees it unchanged: only what lies behind its end is written. Two
    that were extended from one must go on with the same positions, as rows and clones do (the next column), and what
    was cut short must be a tensor of its own.
    """
    length, count = positions.shape[-1], new.shape[-1]
    if positions.ndim > 1 or positions.dtype != new.dtype:
        return torch.cat([positions, new], -1)
    room = positions.untyped_storage().nbytes() // positions.element_size() - positions.storage_offset()
    if length + count > room or positions.stride() != (1,):
        with torch.inference_mode(False):  # steps may come inside and outside of it
            buffer = positions.new_empty(length + count + max(length // 2, 256))
        buffer[:length] = positions
        positions = buffer[:length]
    grown = positions.as_strided((length + count,), (1,))
    grown[length:] = new
    return grown
