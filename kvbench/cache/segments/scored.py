"""Full-precision tokens with the attention that each has received so far (H2O), as fp32 scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.segments.base import FullSegment


class ScoredSegment(FullSegment):
    """Full-precision tokens with scores, which are moved and dropped together with their tokens.

    The attention of a step is first kept as pending (:meth:`observe`) and added to the scores later (:meth:`commit`),
    since the tokens of the step may still be taken back, and the attention of their queries with them.
    """

    def __init__(self, *others: Any, **more: Any) -> None:
        super().__init__(*others, **more)
        batch = len(self.lengths)
        self.scores = FullSegment(batch, self.heads, 1, torch.float32, self.device, capacity=self.capacity)
        #: for each row the pending attention of its latest steps, oldest first, ``[H, scores, q, slots]`` each
        self.pending: list[list[Tensor]] = [[] for _ in range(batch)]

    def append(self, rows: slice, x: Tensor) -> None:
        """Append tokens ``[rows, H, n, D]`` with a score of 0."""
        super().append(rows, x)
        self.scores.append(rows, self.scores.view(rows).new_zeros(*x.shape[:3], self.scores.channels))

    def begin(self, rows: slice, scores: Tensor) -> None:
        """Set the scores of all tokens of `rows`, ``[rows, H, slots, scores]``.

        The last dimension is 1, or the number of query heads per KV head if each keeps a score; equal for all rows.
        """
        if scores.shape[-1] != self.scores.channels:
            segment = FullSegment(
                len(self.lengths), self.heads, scores.shape[-1], torch.float32, self.device, capacity=self.capacity
            )
            segment.starts, segment.lengths = self.scores.starts, self.scores.lengths
            self.scores = segment
        self.scores.view(rows).copy_(scores)

    def observe(self, rows: slice, received: Tensor) -> None:
        """Keep the attention of new queries to all slots, ``[rows, H, scores, q, slots]``, until :meth:`commit`."""
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            self.pending[row].append(received[number])

    def commit(self, rows: slice) -> Tensor:
        """Add the pending attention to the scores and return a view of these, fp32 ``[rows, H, slots, scores]``."""
        scores = self.scores.view(rows)
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            for received in self.pending[row]:
                scores[number, :, : received.shape[-1]] += received.sum(-2).transpose(-1, -2)
            self.pending[row] = []
        return scores

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest `count` tokens of `rows` and their scores."""
        self.commit(rows)  # pending attention numbers the slots from the front
        super().drop_front(rows, count)
        self.scores.drop_front(rows, count)

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest `count` tokens of `row` and their scores."""
        super().drop_back(row, count)
        self.scores.drop_back(row, count)
        left, steps = count, self.pending[row]
        while left and steps:  # each new token is both a query and a slot in its step's attention
            last = steps.pop()
            taken = min(left, last.shape[-2])
            if taken < last.shape[-2]:
                steps.append(last[..., : last.shape[-2] - taken, : last.shape[-1] - taken])
            left -= taken

    def keep(self, rows: slice, index: Tensor) -> None:
        """Keep only the tokens `index` of `rows`, in that order, and their scores."""
        scores = self.commit(rows)
        index = index.to(self.device).expand(*scores.shape[:2], index.shape[-1])
        chosen = scores.gather(2, index[..., None].expand(*index.shape, scores.shape[-1]))
        self.scores._set(rows, 0, 0)
        super().keep(rows, index)  # appends the tokens, with scores of 0
        self.scores.view(rows).copy_(chosen)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers of the tokens and of their scores; the bill counts scores as ``index``."""
        return [*super().buffers(), ("index", self.scores.buffer)]

    def used(self, row: int) -> dict[str, int]:
        """Return the bytes of the tokens of `row` and of their scores."""
        return {**super().used(row), "index": self.scores.used(row)["window"]}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer of the tokens only; :meth:`select` and :meth:`clone` treat the scores."""
        super().map_buffers(change)

    def select(self, index: Tensor) -> None:
        """Reorder the rows and their scores by `index` ``[B]``."""
        super().select(index)
        self.scores.select(index)
        self.pending = [list(self.pending[i]) for i in index.tolist()]

    def clone(self) -> ScoredSegment:
        """Return an independent copy, the scores included."""
        twin = super().clone()
        assert isinstance(twin, ScoredSegment)
        twin.scores, twin.pending = self.scores.clone(), [list(steps) for steps in self.pending]
        return twin
