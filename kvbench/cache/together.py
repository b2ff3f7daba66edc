"""Settling of all layers of a cache together, so that identical rolls share a kernel launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.roll_together import Move, Roll, joined, together
from kvbench.cache.layer import KVLayer
from kvbench.cache.segments.rolling import RollingSegment


def settle(layers: Sequence[KVLayer], rolls: Deferred[Roll]) -> None:
    """Settle all layers of a cache; those that drop the same tokens share a kernel launch.

    To settle is to drop the tokens that are due by the method's rule. Nearly always all layers are in the same state.
    Then the method, which must set ``packs_together``, decides for the first layer only, and the others copy its
    result. `rolls` is the cache's queue of deferred moves of rolling windows (``Progress.rolls``).
    """
    with together(rolls) as deferred:
        known: tuple[Hashable, KVLayer, list[RollingSegment], list[tuple[Move, ...]]] | None = None
        for layer in layers:
            segments = layer.rolling()
            before = segments and (layer.seen, layer.sealed, layer.window, [segment.state() for segment in segments])
            if known is not None and before == known[0]:
                for segment, other, moves in zip(segments, known[2], known[3], strict=True):
                    segment.follow(other, moves)
                    deferred.append((segment, moves))
                layer.firm[:] = known[1].firm
                continue
            first = len(deferred)
            layer.settle()
            if before and known is None:
                rolled = joined(deferred[first:])
                known = before, layer, segments, [rolled.get(id(segment), (segment, ()))[1] for segment in segments]
