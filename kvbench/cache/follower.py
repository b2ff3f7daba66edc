"""Copies of the newest tokens from the target's cache to the draft's own."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import Side


def copy_newest(layer: KVLayer, source: KVLayer, counts: Sequence[int]) -> None:
    """Append the newest tokens of one layer to another one, in the basis and with the positions of the latter.

    `layer` belongs to the draft's cache. `source`, the same layer of the target's, still holds these tokens in full
    precision. Of each row, ``counts[row]`` tokens are copied.
    """
    sides: tuple[Side, Side] = ("key", "value")
    for side, store, source_store in zip(sides, layer.stores(), source.stores(), strict=True):
        transform, source_transform = layer.transform(side), source.transform(side)
        for row, count in enumerate(counts):
            one = slice(row, row + 1)
            newest = source_store.tail.view(one)
            newest = newest[:, :, newest.shape[2] - count :]
            if source_transform is not transform and source_transform is not None:
                newest = source_transform.back(newest)
            if side == "key":
                newest = source.handed_on(one, newest, source.seen - count)
            if source_transform is not transform and transform is not None:
                newest = transform.keys(newest)
            store.tail.append(one, newest)
    most = max(counts)
    layer.seen += most
    # rows end at the same column: a row that got fewer tokens moves right, behind more padding
    for row, order in enumerate(layer.order):
        if order is not None:
            layer.order[row] = order + (most - counts[row])
        layer.firm[row] += most - counts[row]
