"""Rotary positions of a cache's columns, for layers that hold pre-RoPE keys.

The position ids that a model is given need not equal the columns minus the padding: a caller may omit them, or reuse a
cache. So the ids of each step are recorded, on the host, as runs of consecutive positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RopePositions:
    """The RoPE position of each column of a batch, row by row.

    Args:
        runs: for each row, ascending pairs (column, position). Each begins a run of columns in which the position grows
            by one per column; the run ends where the next one begins.
    """

    runs: list[list[tuple[int, int]]] = field(default_factory=list)

    def see(self, ids: Tensor, first: int, starts: Sequence[int]) -> None:
        """Record the position ids that the model used for new tokens, ``[B or 1, q]``.

        Whatever was recorded for these and later columns is replaced.

        Args:
            first: column of the first new token.
            starts: for each row, the column of its first real token; positions of padding are not recorded.
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
                # a step that goes on where the last one ended needs no run of its own
                if not runs or position - column != runs[-1][1] - runs[-1][0]:
                    runs.append((column, position))

    def at(self, row: int, columns: Tensor) -> Tensor:
        """Return the RoPE positions of some columns of a row, both int64 ``[n]`` on the CPU; 0 for padding."""
        runs = self.runs[row]
        if len(runs) == 1:
            return (columns + (runs[0][1] - runs[0][0])).clamp_(min=0)
        begins = torch.tensor([column for column, _ in runs])
        offsets = torch.tensor([0, *(position - column for column, position in runs)])
        which = torch.searchsorted(begins, columns, right=True)
        return torch.where(which > 0, columns + offsets[which], 0)

    def shift(self, by: Sequence[int]) -> None:
        """Shift the tokens of each row by so many columns, behind new padding; their position ids do not change.

        Needed after a rollback in which rows lose different numbers of tokens: rows that lose more get more padding on
        the left.
        """
        self.runs = [[(c + n, p) for c, p in runs] for runs, n in zip(self.runs, by, strict=True)]

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; `order` gives the old row of each new one."""
        if self.runs:
            self.runs = [list(self.runs[i]) for i in order]

    def clone(self) -> RopePositions:
        """Return an independent copy of the positions."""
        return RopePositions([list(runs) for runs in self.runs])
