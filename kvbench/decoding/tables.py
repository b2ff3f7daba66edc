"""Tables that tell a recorded pass where the tokens of every layer lie, and their way to the device.

The tables of all layers are one array of int32, in the order of the layers. Those of a layer are its table of phases
(:attr:`kvbench.attention.phases.Work.table`) and the places of its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.attention.phases import FIELDS, divide_into_phases
from kvbench.cache import KVCache
from kvbench.cache.layer import KVLayer

#: number of host buffers for arrays on their way to the device: the host may be one step less than that ahead of it
RING = 4

Numbers = np.ndarray[Any, Any]


@dataclass
class Layout:
    """Places of the tokens of all layers of a cache, as tables for the device.

    Args:
        shape: for each layer its phases, as pairs (number of the key segment, number of the value segment).
        counts: for each layer the numbers of its table as nested lists (:attr:`kvbench.attention.phases.Work.counts`).
        numbers: the tables of all layers, int32. Those of a layer are its table of phases ``[B, phases, 3]``, then the
            places of its new tokens ``[B, 2]``.
        pointers: for each layer the addresses of its buffers; if one changes, a recorded pass is no longer valid.
    """

    shape: list[list[tuple[int, int]]]
    counts: list[list[list[tuple[int, int, int]]]]
    numbers: Numbers
    pointers: list[tuple[int, ...]]

    def same_buffers(self, other: Layout | None) -> bool:
        """Return True if passes that were recorded for `other` can read the tables of this layout."""
        return other is not None and self.shape == other.shape and self.pointers == other.pointers

    def spans(self, batch: int) -> list[tuple[int, int, int]]:
        """Return where the tables of each layer begin, where its places begin, and where they end."""
        spans, first = [], 0
        for order in self.shape:
            middle = first + batch * len(order) * FIELDS
            spans.append((first, middle, middle + 2 * batch))
            first = middle + 2 * batch
        return spans


def laid_out(cache: KVCache, places: Sequence[Sequence[tuple[int, int]]]) -> Layout:
    """Describe where the tokens of a cache lie, new ones included, which already count as stored.

    Args:
        places: for each layer and row, where the first new key and the first new value are to be written.

    Raises:
        NotServed: keys and values of a phase are both packed, but begin at different places in their tiles.
    """
    shape, every, numbers = [], [], []
    known: dict[Any, Any] = {}
    for layer, place in zip(cache.kv_layers, places, strict=True):
        # layers of a cache nearly always have equal lengths: their tables are computed once
        key = (*layer_state(layer), frozenset(layer.pairs), layer.window)
        if key not in known:
            order, counts = divide_into_phases(layer)
            flat = np.array(counts, dtype=np.int32).reshape(-1)
            known[key] = order, counts, np.concatenate([flat, np.array(place, dtype=np.int32).reshape(-1)])
        order, counts, block = known[key]
        layer.pairs.update(order)
        shape.append(order)
        every.append(counts)
        numbers.append(block)
    return Layout(shape, every, np.concatenate(numbers), [pointers(layer) for layer in cache.kv_layers])


def layer_state(layer: KVLayer) -> tuple[Any, ...]:
    """Return the lengths and starts of all segments of a layer; layers for which they are equal have equal tables."""
    return tuple(
        (tuple(segment.lengths), tuple(getattr(segment, "starts", ())))
        for store in layer.stores()
        for segment in store.segments
    )


def pointers(layer: KVLayer) -> tuple[int, ...]:
    """Return the memory addresses of all buffers of a layer, to find out later whether one was reallocated."""
    return tuple(
        buffer.data_ptr() for store in layer.stores() for segment in store.segments for _, buffer in segment.buffers()
    )


class Upload:
    """Copies of arrays from the host to one tensor on the device, for which the host does not wait."""

    def __init__(self, target: Tensor) -> None:
        self.target, self._sent = target, 0
        cuda = target.is_cuda
        with torch.inference_mode(False):
            self._host = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=cuda) for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING

    def send(self, numbers: Numbers) -> None:
        """Queue a copy of an array, which may be changed afterwards, with shape and dtype of the target."""
        slot = self._sent % RING
        self._sent += 1
        event = self._copied[slot]
        if event is not None:
            event.synchronize()  # waits for the copy of RING steps ago, which has usually finished
        self._host[slot].numpy()[:] = numbers
        self.target.copy_(self._host[slot], non_blocking=True)
        if self.target.is_cuda:
            event = event or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.target.device))
            self._copied[slot] = event
