"""Settling all layers of a cache with shared kernel launches, and copying of new tokens to a draft's cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvbench.cache.kernels.jobs import Deferred
from kvbench.cache.kernels.roll_together import Move, Roll, moves_by_segment, rolling_together
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.base import Side
from kvbench.cache.segments.rolling import RollingSegment


def settle(layers: Sequence[KVLayer], rolls: Deferred[Roll]) -> None:
    """Settle all layers of a cache; those that drop the same tokens share a kernel launch.

    To settle is to pack and drop the tokens that are due by the method's rule. The method must set ``packs_together``.
    If all segments of several layers are rolling windows in the same state, it decides for the first of these layers
    only, and the others copy its result. `rolls` is the cache's queue of deferred moves (``Progress.rolls``).
    """
    with rolling_together(rolls) as deferred:
        # of the first layer whose segments all roll: its state before, the layer, its segments, and the moves of each
        known: tuple[Hashable, KVLayer, list[RollingSegment], list[tuple[Move, ...]]] | None = None
        for layer in layers:
            segments = layer.rolling()
            before = segments and (layer.seen, layer.sealed, layer.window, [segment.state() for segment in segments])
            if known is not None and before == known[0]:
                _, first_layer, first_segments, first_moves = known
                for segment, other, moves in zip(segments, first_segments, first_moves, strict=True):
                    segment.follow(other, moves)
                    deferred.append((segment, moves))
                layer.firm[:] = first_layer.firm
                continue
            queued = len(deferred)
            layer.settle()
            if before and known is None:
                rolled = moves_by_segment(deferred[queued:])  # without segments that have not moved
                known = before, layer, segments, [rolled.get(id(segment), (segment, ()))[1] for segment in segments]


def copy_newest(layer: KVLayer, source: KVLayer, counts: Sequence[int]) -> None:
    """Append the newest tokens of one layer to another one, in the basis and with the positions of the latter.

    `layer` belongs to the draft's cache. `source`, the same layer of the target's cache, still holds these tokens in
    full precision. Of each row, ``counts[row]`` tokens are copied.
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
                newest = transform.keys(newest)  # which are multiplied by the same matrix as values
            store.tail.append(one, newest)
    most = max(counts)
    layer.seen += most
    # rows end at the same column: a row that got fewer tokens moves right, behind more padding
    for row, order in enumerate(layer.order):
        if order is not None:
            layer.order[row] = order + (most - counts[row])
        layer.firm[row] += most - counts[row]
