"""Which layer, side and position held the NaN or Inf that a method met when it placed or settled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer


def located_in_tails(layer: KVLayer, error: NonFiniteError, rows: slice) -> NonFiniteError:
    """:func:`located` for tokens that a method was settling: each side has a window and an order of its own."""
    stores, first = layer.stores(), rows.indices(layer.batch)[0]
    try:
        for side, store in enumerate(stores):
            tail = store.tail.view(rows)
            if not bool(torch.isfinite(tail).all()):
                # one side may be settled already: the order of the slots is that of the side that is not
                layer.keys_store = max(stores, key=lambda s: s.tail.length(rows))
                newest = layer.positions(first)[..., -tail.shape[2] :]
                both = [tail[:, :, :0], tail[:, :, :0]]
                both[side] = tail
                return located(layer, error, rows, both[0], both[1], newest)
    finally:
        layer.keys_store = stores[0]
    return error


def located(
    layer: KVLayer, error: NonFiniteError, rows: slice, keys: Tensor, values: Tensor, positions: Tensor
) -> NonFiniteError:
    """The error with the place in words, or as it is where everything is finite.

    Args:
        rows: of the batch that `keys` and `values` ``[rows, H, n, D]`` belong to.
        positions: of the tokens, ``[n]`` or ``[H, n]``.
    """
    for side, x in (("key", keys), ("value", values)):
        bad = ~torch.isfinite(x)
        if bool(bad.any()):
            b, h, t, d = bad.nonzero()[0].tolist()
            if x.shape[0] != layer.batch:
                b += rows.indices(layer.batch)[0]
            position = int(positions.expand(layer.heads, -1)[h, t])
            return NonFiniteError(
                f"layer {layer.index}: NaN or Inf in the {side} at position {position} (row {b}, KV head {h}, "
                f"channel {d}). Load the model with a dtype of more range: model.dtype=bfloat16 or float32"
            )
    return error
