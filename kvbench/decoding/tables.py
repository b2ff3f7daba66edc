"""Tables that tell a recorded pass where the tokens of every layer are, and the lengths of a cache on the device.

The passes of a round of speculation share the lengths and update them on the device.

The tables of all layers are one array of int32, in the order of the layers. A layer has a table of its phases, which
are runs of tokens with one format of keys and one format of values (:attr:`kvbench.attention.phases.Work.table`), and
the places of its new tokens.

The host need not know how many drafts were accepted before it queues the next round: the device adds the accepted
tokens to the lengths itself. The host repeats the bookkeeping of the cache later, while the device works on that round.
Only if a method has to pack or drop tokens, or a buffer is full, must the host do so first (:attr:`Ledger.room`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
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
        shape: for each layer its phases (runs of tokens in one segment of keys and one of values), as pairs of the
            indices of these segments.
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
        """Return, per layer, the indices in `numbers` where its table begins, its places begin, and its places end."""
        spans, first = [], 0
        for order in self.shape:
            middle = first + batch * len(order) * FIELDS
            spans.append((first, middle, middle + 2 * batch))
            first = middle + 2 * batch
        return spans


def laid_out(cache: KVCache, places: Sequence[Sequence[tuple[int, int]]]) -> Layout:
    """Describe where the tokens of a cache are; new tokens already count as stored.

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
    """Return the lengths and starts of all segments of a layer, on which its tables depend."""
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
    """Sender of arrays from the host to one tensor on the device, without waiting for the copies."""

    def __init__(self, target: Tensor) -> None:
        self.target, self._sent = target, 0
        cuda = target.is_cuda
        with torch.inference_mode(False):
            self._host = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=cuda) for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING

    def send(self, numbers: Numbers) -> None:
        """Queue a copy of an array with the target's shape and dtype; the caller may change the array afterwards."""
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


class Ledger:
    """Tables of one cache on the device, as they are with one new token per row.

    The cache already contains the prompts.

    Attributes:
        tables: the tables, int32 ``[n]``. The places in them are those of the first new token.
        last: 1 where the tables contain the length of the newest phase, which new tokens extend, else 0; int32 ``[n]``.
        growth: 1 where the tables grow with each token: that length, and the places of new tokens; int32 ``[n]``.
        row: row of the batch to which each number of the tables belongs, ``[n]``.
        layout: the same tables on the host, as they were when they were last sent; None before that.
        version: number that increases when buffers have been reallocated, after which earlier recordings are invalid.
        room: for each row, how many tokens more than at the last :meth:`refresh` the device may add on its own.
        gained: for each row, how many tokens the device has added since then.
        behind: the last round, which the cache on the host does not contain yet: the number of tokens in a row's
            verification, and for each row how many of them have been confirmed. None if it contains all rounds.
    """

    tables: Tensor
    last: Tensor
    growth: Tensor
    row: Tensor

    def __init__(self, cache: KVCache, batch: int, device: torch.device) -> None:
        self.cache, self.batch, self.device = cache, batch, device
        self.layout: Layout | None = None
        self.version = 0
        self.room, self.gained = [0] * batch, [0] * batch
        self.behind: tuple[int, list[int]] | None = None

    def refresh(self, most: int) -> None:
        """Send the tables to the device as the cache is now; call this when the method has packed or dropped tokens.

        Every layer makes room for `most` new tokens per row.

        Raises:
            NotServed: a layer cannot be served by a recorded pass.
        """
        tails = [store.tail for layer in self.cache.kv_layers for store in layer.stores()]
        for tail in tails:
            if max(map(add, tail.starts, tail.lengths)) + most > tail.capacity:
                before = list(tail.lengths)
                tail.advance(most)
                tail.lengths[:] = before
        places = [
            list(zip(map(add, k.starts, k.lengths), map(add, v.starts, v.lengths), strict=True))
            for k, v in zip(tails[::2], tails[1::2], strict=True)
        ]
        for tail in tails:  # a phase without tokens has no place, so the tables are those with the first new token
            tail.lengths[:] = [length + 1 for length in tail.lengths]
        try:
            layout = laid_out(self.cache, places)
        finally:
            for tail in tails:
                tail.lengths[:] = [length - 1 for length in tail.lengths]
        if not layout.same_buffers(self.layout):
            self._allocate(layout)
        self._upload.send(layout.numbers)
        self.layout, self.room, self.gained = layout, self._room(most), [0] * self.batch

    def fits(self, more: int = 0) -> bool:
        """Return True if a pass after `more` further tokens per row needs no packing, dropping or moving before it."""
        return all(gained + more <= room for gained, room in zip(self.gained, self.room, strict=True))

    def catch_up(self) -> None:
        """Add the tokens of the last round to the cache on the host, unless that has been done."""
        (count, emitted), self.behind = self.behind or (0, []), None
        if count:
            for layer in self.cache.kv_layers:
                layer.advance(count)
            self.cache.take_back([count - confirmed for confirmed in emitted])
            self.cache.progress.watches.poll()

    def add(self, counts: Tensor) -> None:
        """Add confirmed tokens, int32 ``[B]``, to the lengths, on the device."""
        self.tables.addcmul_(self.growth, counts.index_select(0, self.row))

    def _allocate(self, layout: Layout) -> None:
        last, growth, row = (np.zeros(len(layout.numbers), dtype=np.int32) for _ in range(3))
        rows = np.arange(self.batch)
        for order, (first, middle, end) in zip(layout.shape, layout.spans(self.batch), strict=True):
            # a phase has FIELDS numbers, of which the third is its length; a row's last phase is the newest
            newest = first + (rows * len(order) + len(order) - 1) * FIELDS + 2
            last[newest] = growth[newest] = 1
            growth[middle:end] = 1
            row[first:middle] = rows.repeat(len(order) * FIELDS)
            row[middle:end] = rows.repeat(2)
        with torch.inference_mode(False):
            self.last, self.growth, self.row = (torch.from_numpy(x).to(self.device) for x in (last, growth, row))
            self.tables = torch.zeros_like(self.last)
        self._upload = Upload(self.tables)
        self.version += 1

    def _room(self, most: int) -> list[int]:
        """Return how many tokens each row may get before a layer must pack or drop tokens, or a buffer is full."""
        known: set[Any] = set()
        room = [1 << 30] * self.batch
        for layer in self.cache.kv_layers:
            tails = [store.tail for store in layer.stores()]
            key = (layer_state(layer), layer.window, *(tail.capacity for tail in tails))
            if key in known:
                continue
            known.add(key)
            for row in range(self.batch):
                free = [tail.capacity - tail.starts[row] - tail.lengths[row] - most for tail in tails]
                room[row] = max(0, min(room[row], *free, layer.method.idle(layer, row)))
        return room
