"""RoPE for keys that are stored before it and rotated when attention reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.state import LayerState
from kvbench.errors import CacheError


def rotated_prompt(layer: LayerState, keys: Tensor) -> Tensor:
    """Return the keys of a prompt after RoPE, for a layer that may store them before RoPE.

    Args:
        layer: layer of the keys.
        keys: keys of the prompt as the layer stores them, including padding, ``[B, H, T, D]``. If they are stored after
            RoPE, they are returned unchanged.
    """
    if layer.rope is None:
        return keys
    columns = torch.arange(keys.shape[2])
    return layer.rope(keys, _stacked(layer, range(layer.batch), [columns] * layer.batch))


def rotated_slots(layer: LayerState, rows: slice, start: int, stop: int, keys: Tensor) -> Tensor:
    """Return keys read from consecutive slots after RoPE, for a layer that may store them before RoPE.

    Args:
        layer: layer that holds the slots.
        rows: rows of the batch.
        start: first slot.
        stop: one past the last slot.
        keys: keys of these slots as the layer stores them, ``[rows, H, stop - start, D]``. If they are stored after
            RoPE, they are returned unchanged.

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


def rotated_columns(layer: LayerState, first: int, keys: Tensor) -> Tensor:
    """Return the keys of consecutive columns after RoPE, for a layer that stores them before RoPE.

    Args:
        layer: layer of the keys.
        first: column of the first key.
        keys: keys as the layer stores them, ``[B, H, n, D]``.
    """
    assert layer.rope is not None
    columns = torch.arange(first, first + keys.shape[2])
    return layer.rope(keys, _stacked(layer, range(layer.batch), [columns] * layer.batch))


def handed_on(layer: LayerState, rows: slice, keys: Tensor, first: int) -> Tensor:
    """Convert keys for the follower of a layer: apply or undo RoPE if only one of the two stores keys before it.

    The follower is the same layer in the cache of a draft model, which gets its tokens from this one.

    Args:
        layer: layer with a follower.
        rows: rows of the batch.
        keys: keys of consecutive columns as `layer` stores them, ``[rows, H, n, D]``.
        first: column of the first key.
    """
    assert layer.follower is not None
    mine, other = layer.rope, layer.follower.rope
    if (mine is None) == (other is None):
        return keys
    columns, numbers = torch.arange(first, first + keys.shape[2]), range(*rows.indices(layer.batch))
    positions = _stacked(layer, numbers, [columns] * len(numbers))
    if mine is not None:
        return mine(keys, positions)
    assert other is not None
    return other(keys.float(), positions, inverse=True).to(keys.dtype)


def _stacked(layer: LayerState, numbers: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
    return torch.stack([layer.progress.positions.at(row, c) for row, c in zip(numbers, columns, strict=True)])
