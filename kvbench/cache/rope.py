"""RoPE for layers that store keys before RoPE, applied when attention reads the keys.

All functions take keys as the layer stores them. :func:`rotated_prompt` and :func:`rotated_slots` return them unchanged
if the layer stores keys after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import KVLayer
from kvbench.errors import CacheError


def rotated_prompt(layer: KVLayer, keys: Tensor) -> Tensor:
    """Return the keys of a prompt, ``[B, H, T, D]`` including padding, after RoPE."""
    if layer.rope is None:
        return keys
    columns = torch.arange(keys.shape[2])
    return layer.rope(keys, _stacked(layer, range(layer.batch), [columns] * layer.batch))


def rotated_slots(layer: KVLayer, rows: slice, start: int, stop: int, keys: Tensor) -> Tensor:
    """Return the keys read from the slots ``[start, stop)``, ``[rows, H, stop - start, D]``, after RoPE.

    Raises:
        CacheError: the layer holds pre-RoPE keys, and the heads of a row hold different tokens.
    """
    if layer.rope is None:
        return keys
    numbers = range(*rows.indices(layer.batch))
    columns = []
    for row in numbers:
        order = layer.method.positions(layer, row)
        if order is not None and order.ndim > 1:
            raise CacheError(
                "a cache of pre-RoPE keys must hold the same tokens in all heads of a layer, because their positions "
                "are recorded by row, not by head"
            )
        columns.append(torch.arange(start, stop) + layer.first(row) if order is None else order[start:stop])
    return layer.rope(keys, _stacked(layer, numbers, columns))


def rotated_columns(layer: KVLayer, first: int, keys: Tensor) -> Tensor:
    """Return pre-RoPE keys ``[B, H, n, D]`` of consecutive columns from `first` on, rotated to their positions."""
    assert layer.rope is not None
    columns = torch.arange(first, first + keys.shape[2])
    return layer.rope(keys, _stacked(layer, range(layer.batch), [columns] * layer.batch))


def _stacked(layer: KVLayer, numbers: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
    return torch.stack([layer.progress.positions.at(row, c) for row, c in zip(numbers, columns, strict=True)])
