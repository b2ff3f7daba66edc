"""Layers whose keys are stored before RoPE: the positions of their columns, and the rotation when keys are read.

A model is given position ids; they need not be columns less padding (a caller may leave them out, or re-use a cache),
so they are recorded as they come, as runs of consecutive positions on the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.errors import CacheError

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer


@dataclass
class RopePositions:
    """Positions of each row.

    Args:
        runs: for each row ascending (column, position of that column); each run ends where the next begins.
    """

    runs: list[list[tuple[int, int]]] = field(default_factory=list)

    def see(self, ids: Tensor, first: int, starts: Sequence[int]) -> None:
        """Columns ``first, first + 1, ...`` have the positions ``ids`` ``[B or 1, q]``; what stood there is forgotten.

        Args:
            starts: columns of each row's first real token: padding has no position.
        """
        if len(self.runs) != len(starts):
            self.runs = [[] for _ in starts]
        ids = ids.expand(len(starts), -1).cpu()
        for row, start in enumerate(starts):
            runs = self.runs[row]
            del runs[bisect_left(runs, (first, -1)) :]
            begin = max(start - first, 0)
            row_ids = ids[row, begin:]
            if not len(row_ids):
                continue
            breaks = [0, *((row_ids.diff() != 1).nonzero().flatten() + 1).tolist()]
            for place in breaks:
                column, position = first + begin + place, int(row_ids[place])
                if not runs or position - column != runs[-1][1] - runs[-1][0]:
                    runs.append((column, position))

    def at(self, row: int, columns: Tensor) -> Tensor:
        """Positions of ``columns`` (int64 ``[n]``, CPU); 0 for padding."""
        runs = self.runs[row]
        if len(runs) == 1:
            return (columns + (runs[0][1] - runs[0][0])).clamp_(min=0)
        begins = torch.tensor([column for column, _ in runs])
        offsets = torch.tensor([0, *(position - column for column, position in runs)])
        which = torch.searchsorted(begins, columns, right=True)
        return torch.where(which > 0, columns + offsets[which], 0)

    def shift(self, by: Sequence[int]) -> None:
        """Rows move to the right by so many columns."""
        self.runs = [[(c + n, p) for c, p in runs] for runs, n in zip(self.runs, by, strict=True)]

    def select(self, order: Sequence[int]) -> None:
        """Rows `order` become the batch."""
        if self.runs:
            self.runs = [list(self.runs[i]) for i in order]

    def clone(self) -> RopePositions:
        """An independent copy."""
        return RopePositions([list(runs) for runs in self.runs])


def rotated_prompt(layer: KVLayer, keys: Tensor) -> Tensor:
    """The open prompt's keys ``[B, H, T, D]``, padding and all, as attention takes them: after RoPE."""
    if layer.rotation is None:
        return keys
    columns = torch.arange(keys.shape[2])
    return layer.rotation(keys, _stacked(layer, range(layer.batch), [columns] * layer.batch))


def rotated_slots(layer: KVLayer, rows: slice, start: int, stop: int, keys: Tensor) -> Tensor:
    """Keys ``[rows, H, stop - start, D]`` of the slots ``[start, stop)`` after RoPE.

    Raises:
        CacheError: heads keep different tokens.
    """
    if layer.rotation is None:
        return keys
    numbers = range(*rows.indices(layer.batch))
    columns = []
    for row in numbers:
        order = layer.method.positions(layer, row)
        if order is not None and order.ndim > 1:
            raise CacheError("heads that keep different tokens cannot store their keys before RoPE")
        columns.append(torch.arange(start, stop) + layer.first(row) if order is None else order[start:stop])
    return layer.rotation(keys, _stacked(layer, numbers, columns))


def handed_on(layer: KVLayer, rows: slice, keys: Tensor, first: int) -> Tensor:
    """Keys ``[rows, H, n, D]`` of the columns ``first, first + 1, ...`` as the layer's follower stores them."""
    assert layer.follower is not None
    mine, other = layer.rotation, layer.follower.rotation
    if (mine is None) == (other is None):
        return keys
    columns, numbers = torch.arange(first, first + keys.shape[2]), range(*rows.indices(layer.batch))
    positions = _stacked(layer, numbers, [columns] * len(numbers))
    if mine is not None:
        return mine(keys, positions)
    assert other is not None
    return other(keys.float(), positions, inverse=True).to(keys.dtype)


def _stacked(layer: KVLayer, numbers: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
    return torch.stack([layer.progress.positions.at(row, c) for row, c in zip(numbers, columns, strict=True)])
