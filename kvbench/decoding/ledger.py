"""Lengths of a cache on the device, which the passes of a round of speculation share and update there.

The host need not know how many drafts were accepted before it queues the next round: the device adds the accepted
tokens to the lengths itself. The host repeats the bookkeeping of the cache later, while the device works on that round.
Only if a method has to pack or drop tokens, or a buffer is full, must the host do so first (:attr:`Ledger.room`).
"""

from __future__ import annotations

from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.attention.phases import FIELDS
from kvbench.cache import KVCache
from kvbench.decoding.tables import Layout, Upload, laid_out, layer_state


class Ledger:
    """Tables of one cache on the device (:mod:`kvbench.decoding.tables`), as they are with one new token per row.

    The cache already contains the prompts.

    Attributes:
        tables: the tables, int32 ``[n]``. The places in them are those of the first new token.
        last: 1 where the tables contain the length of the newest phase, which new tokens extend, else 0; int32 ``[n]``.
        growth: 1 where the tables grow with each token: that length, and the places of new tokens; int32 ``[n]``.
        row: row of the batch to which each number of the tables belongs, ``[n]``.
        layout: the same tables on the host, as they were when they were last sent; None before that.
        version: number that increases when buffers have been reallocated, after which earlier recordings are invalid.
        room: for each row, how many tokens more than at the last :meth:`refresh` the device may add on its own.
        gained: for each row, how many tokens it has added since then.
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
        """Send the tables to the device as the cache is now, after the method has packed or dropped tokens.

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
        """Return how many tokens each row may get before a layer must pack or drop tokens or has a full buffer."""
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
