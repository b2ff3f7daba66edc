"""Lengths of a cache on the device, which the passes of a round of speculation share and update there.

The host need not know how many drafts were accepted before it queues the next round: the device adds the accepted
tokens to the lengths itself. The host repeats the bookkeeping of the cache later, while the device works on that round.
Only if a method has to pack or drop tokens, or a buffer is full, must the host do so first (:attr:`Ledger.room`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.attention.phases import FIELDS
from kvbench.cache import KVCache
from kvbench.decoding.tables import Layout, Upload, laid_out, state


class Ledger:
    """Tables of one cache on the device (:mod:`kvbench.decoding.tables`), as they are with one new token per row.

    Args:
        cache: the cache, which already contains the prompts.
        batch: number of rows.
        device: device of the tables.

    Attributes:
        tables: the tables, int32 ``[n]``. The places in them are those of the first new token.
        last: 1 where the tables contain the length of the newest phase, which new tokens extend, else 0; int32 ``[n]``.
        growth: 1 where the tables grow with each token: that length, and the places of new tokens; int32 ``[n]``.
        row: row of the batch to which each number of the tables belongs, ``[n]``.
        layout: the same tables on the host, as they were when they were last sent; None before that.
        version: number that increases when buffers have been reallocated, after which earlier recordings are invalid.
        room: for each row, how many tokens more than at the last :meth:`refresh` the device may add on its own.
    """

    tables: Tensor
    last: Tensor
    growth: Tensor
    row: Tensor

    def __init__(self, cache: KVCache, batch: int, device: torch.device) -> None:
        self.cache, self.batch, self.device = cache, batch, device
        self.layout: Layout | None = None
        self.version = 0
        self.room = [0] * batch

    def refresh(self, most: int) -> None:
        """Send the tables to the device as the cache is now, after the method has packed or dropped tokens.

        Args:
            most: largest number of new tokens per row in a pass, for which every layer makes room.

        Raises:
            NotServed: a layer cannot be served by a recorded pass.
        """
        cache = self.cache
        for layer in cache.layers:
            layer.advance(most)
        cache.take_back([most - 1] * self.batch)
        # the places of the first new token follow from the lengths with it
        places = [
            [tuple(store.tail.starts[row] + store.tail.lengths[row] - 1 for store in layer.stores()) for row in rows]
            for layer in cache.layers
            for rows in (range(self.batch),)
        ]
        layout = laid_out(cache, places)  # type: ignore[arg-type]
        cache.take_back([1] * self.batch)
        if not layout.same_buffers(self.layout):
            self._allocate(layout)
        self._upload.send(layout.numbers)
        self.layout, self.room = layout, self._room(most)

    def add(self, counts: Tensor) -> None:
        """Add confirmed tokens to the lengths, on the device.

        Args:
            counts: for each row, the number of tokens, int32 ``[B]``.
        """
        self.tables.addcmul_(self.growth, counts.index_select(0, self.row))

    def _allocate(self, layout: Layout) -> None:
        last, growth, row = (np.zeros(len(layout.numbers), dtype=np.int32) for _ in range(3))
        rows = np.arange(self.batch)
        for order, (first, middle, end) in zip(layout.shape, layout.spans(self.batch), strict=True):
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
        """Return how many tokens each row may get before a layer must pack or drop tokens or has a full buffer."""
        known: set[Any] = set()
        room = [1 << 30] * self.batch
        for layer in self.cache.layers:
            tails = [store.tail for store in layer.stores()]
            key = (state(layer), layer.window, *(tail.capacity for tail in tails))
            if key in known:
                continue
            known.add(key)
            for row in range(self.batch):
                free = [tail.capacity - tail.starts[row] - tail.lengths[row] - most for tail in tails]
                room[row] = max(0, min(room[row], *free, layer.method.idle(layer, row)))
        return room
