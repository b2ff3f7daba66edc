"""Full-precision tokens with the attention that each has received so far (H2O), as fp32 scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.segments.base import FullSegment


class ScoredSegment(FullSegment):
    """Tokens in full precision, each with a score per KV head: the attention that it has received so far (H2O).

    The attention of a step is held back at first (:meth:`observe`) and added to the scores later (:meth:`commit`).
    Until then, a rollback can still remove the step's tokens together with the attention that they gave.

    Args:
        *others: positional arguments of :class:`FullSegment`.
        **more: keyword arguments of :class:`FullSegment`.
    """

    def __init__(self, *others: Any, **more: Any) -> None:
        super().__init__(*others, **more)
        batch = len(self.lengths)
        self.scores = FullSegment(batch, self.heads, 1, torch.float32, self.device, capacity=self.capacity)
        #: for each row the pending attention of its latest steps, oldest first, ``[H, scores, q, slots]`` each
        self.pending: list[list[Tensor]] = [[] for _ in range(batch)]

    def append(self, rows: slice, x: Tensor) -> None:
        """Append tokens to some rows, with a score of 0.

        Args:
            rows: rows of the batch.
            x: tokens, ``[rows, H, n, D]``.
        """
        super().append(rows, x)
        self.scores.append(rows, self.scores.view(rows).new_zeros(*x.shape[:3], self.scores.channels))

    def begin(self, rows: slice, scores: Tensor) -> None:
        """Set the scores of all tokens of some rows.

        Args:
            rows: rows of the batch.
            scores: ``[rows, H, slots, S]``. S is the number of scores that a token has per KV head: 1 or, if every
                query head keeps its own, the number of query heads per KV head. It must be the same for all rows of the
                batch.
        """
        if scores.shape[-1] != self.scores.channels:
            segment = FullSegment(
                len(self.lengths), self.heads, scores.shape[-1], torch.float32, self.device, capacity=self.capacity
            )
            segment.starts, segment.lengths = self.scores.starts, self.scores.lengths
            self.scores = segment
        self.scores.view(rows).copy_(scores)

    def observe(self, rows: slice, received: Tensor) -> None:
        """Hold the attention of new queries until :meth:`commit` adds it to the scores, or a rollback removes it.

        Args:
            rows: rows of the batch.
            received: attention from each of the q queries to every slot, for S scores per token (:meth:`begin`),
                ``[rows, H, S, q, slots]``.
        """
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            self.pending[row].append(received[number])

    def commit(self, rows: slice) -> Tensor:
        """Add the attention held by :meth:`observe` to the scores of some rows, and return these scores.

        Args:
            rows: rows of the batch.

        Returns:
            A view of the scores, fp32 ``[rows, H, slots, S]`` for S scores per token (:meth:`begin`).
        """
        scores = self.scores.view(rows)
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            for received in self.pending[row]:
                scores[number, :, : received.shape[-1]] += received.sum(-2).transpose(-1, -2)
            self.pending[row] = []
        return scores

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest tokens of some rows, with their scores.

        Args:
            rows: rows of the batch.
            count: number of tokens to drop.
        """
        self.commit(rows)  # pending attention numbers the slots from the front
        super().drop_front(rows, count)
        self.scores.drop_front(rows, count)

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest tokens of one row, with their scores.

        The attention that they gave to other tokens is dropped too, if it has not yet been added to the scores.

        Args:
            row: row of the batch.
            count: number of tokens to drop.
        """
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
        """Keep only some tokens of some rows, with their scores, and drop all others.

        Args:
            rows: rows of the batch.
            index: indices, within the segment, of the tokens to keep, in their new order: ``[n]``, or ``[H, n]`` or
                ``[rows, H, n]`` if they differ by head or by row.
        """
        scores = self.commit(rows)
        index = index.to(self.device).expand(*scores.shape[:2], index.shape[-1])
        chosen = scores.gather(2, index[..., None].expand(*index.shape, scores.shape[-1]))
        self.scores._set(rows, 0, 0)
        super().keep(rows, index)  # appends the tokens, with scores of 0
        self.scores.view(rows).copy_(chosen)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return two pairs (category, buffer): ``window`` for the tokens, ``index`` for their scores."""
        return [*super().buffers(), ("index", self.scores.buffer)]

    def used(self, row: int) -> dict[str, int]:
        """Return how many bytes the tokens of one row (``window``) and their scores (``index``) need."""
        return {**super().used(row), "index": self.scores.used(row)["window"]}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer of the tokens by ``change(buffer)``.

        Scores are not replaced: :meth:`select` and :meth:`clone` handle them.

        Args:
            change: function that returns the new buffer for an old one. Dimension 0 of a buffer is the batch.
        """
        super().map_buffers(change)

    def select(self, index: Tensor) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            index: for each row of the new batch, the index of its row in the old batch, ``[new batch]``.
        """
        super().select(index)
        self.scores.select(index)
        self.pending = [list(self.pending[i]) for i in index.tolist()]

    def clone(self) -> ScoredSegment:
        """Return an independent copy, including the scores and the attention not yet added to them."""
        twin = super().clone()
        assert isinstance(twin, ScoredSegment)
        twin.scores, twin.pending = self.scores.clone(), [list(steps) for steps in self.pending]
        return twin
