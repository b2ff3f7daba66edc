"""Full-precision tokens, each with the attention that it has received so far (H2O) and its place in the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.segments.base import FullSegment, allocate, overwrite


class ScoredSegment(FullSegment):
    """Tokens in full precision, each with a score per KV head: the attention that it has received so far (H2O).

    The attention of a step is held back at first (:meth:`observe`) and added to the scores later (:meth:`commit`).
    Until then, a rollback can still remove the step's tokens together with the attention that they gave.

    Heads keep different tokens, so the number of each token within its text is stored too, its *place*. Scores and
    places are in device memory, because in a captured step the host does not know which tokens are dropped.

    The arguments are those of :class:`FullSegment`.
    """

    def __init__(self, *others: Any, **more: Any) -> None:
        super().__init__(*others, **more)
        batch = len(self.lengths)
        self.scores = FullSegment(batch, self.heads, 1, torch.float32, self.device, capacity=self.capacity)
        self.places = FullSegment(batch, self.heads, 1, torch.int32, self.device, capacity=self.capacity)
        #: for each row the number of tokens of its text so far, dropped ones included
        self.seen = [0] * batch
        #: for each row the number of its first tokens whose scores and places have been written
        self.known = [0] * batch
        #: for each row the pending attention of its latest steps, oldest first, ``[H, scores, q, slots]`` each
        self.pending: list[list[Tensor]] = [[] for _ in range(batch)]
        #: by number of new tokens, the buffers to which steps at fixed addresses write their attention
        self.rooms: dict[int, Tensor] = {}

    def parts(self) -> tuple[FullSegment, FullSegment]:
        """Return the segments of the scores and of the places, which are moved and dropped with the tokens."""
        return self.scores, self.places

    def append(self, rows: slice, x: Tensor) -> None:
        """See :meth:`FullSegment.append`; the new tokens have a score of 0."""
        super().append(rows, x)
        for part in self.parts() if x.shape[2] else ():
            part.reserve(rows, x.shape[2])
        self.seen[rows] = [seen + x.shape[2] for seen in self.seen[rows]]

    def advance(self, count: int) -> list[int]:
        """See :meth:`FullSegment.advance`; the captured step that writes the tokens also writes their attention."""
        places = super().advance(count)
        for part in self.parts():
            part.advance(count)
        self.seen[:] = [seen + count for seen in self.seen]
        self.hold(self.room(count))
        return places

    def hold(self, room: Tensor) -> None:
        """Do what :meth:`observe` does for all rows, with attention that a kernel writes into `room` (:meth:`room`)."""
        for row, length in enumerate(self.lengths):
            self.pending[row].append(room[row, ..., :length])

    def room(self, count: int, *, fresh: bool = False) -> Tensor:
        """Return a buffer for the attention of `count` new tokens per row, fp32 ``[B, H, S, count, capacity]``.

        S is the number of scores per token (:meth:`begin`). Calls with the same `count` return the same buffer, until
        the buffer of the tokens grows; `fresh` allocates another one.
        """
        shape = (len(self.lengths), self.heads, self.scores.channels, count, self.capacity)
        if fresh:
            return allocate(shape, torch.float32, self.device)
        if count not in self.rooms or self.rooms[count].shape != shape:
            self.rooms[count] = allocate(shape, torch.float32, self.device)
        return self.rooms[count]

    def begin(self, rows: slice, scores: Tensor, places: Tensor | None = None, seen: int | None = None) -> None:
        """Set the scores and places of all tokens of some rows.

        Args:
            scores: ``[rows, H, slots, S]``. S is the number of scores that a token has per KV head: 1 or, if every
                query head keeps its own, the number of query heads per KV head. It must be the same for all rows of the
                batch.
            places: number of each token within its text, ``[rows, H, slots]``; None: they are the newest tokens in
                order.
            seen: number of tokens of these rows so far, dropped ones included; None: as many as were appended.
        """
        if scores.shape[-1] != self.scores.channels:
            segment = FullSegment(
                len(self.lengths), self.heads, scores.shape[-1], torch.float32, self.device, capacity=self.capacity
            )
            segment.starts, segment.lengths = self.scores.starts, self.scores.lengths
            self.scores, self.rooms = segment, {}
        self.scores.view(rows).copy_(scores)
        count = len(self.lengths[rows])
        self.seen[rows] = self.seen[rows] if seen is None else [seen] * count
        if places is None:
            last = self.seen[rows][0]
            places = torch.arange(last - scores.shape[2], last, device=self.device)
        self.places.view(rows)[..., 0] = places
        self.known[rows] = [scores.shape[2]] * count

    def observe(self, rows: slice, received: Tensor) -> None:
        """Hold the attention of new queries until :meth:`commit` adds it to the scores, or a rollback removes it.

        `received` is the attention from each of the q queries to every slot, for S scores per token (:meth:`begin`),
        ``[rows, H, S, q, slots]``.
        """
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            self.pending[row].append(received[number])

    def commit(self, rows: slice) -> Tensor:
        """Add the attention held by :meth:`observe` to the scores of some rows; return a view of the scores.

        The view is fp32 ``[rows, H, slots, S]`` for S scores per token (:meth:`begin`).
        """
        scores, places = self.scores.view(rows), self.places.view(rows)
        for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
            known, length = self.known[row], self.lengths[row]
            if known < length:
                scores[number, :, known:] = 0.0
                newest = torch.arange(self.seen[row] - length + known, self.seen[row], device=self.device)
                places[number, :, known:, 0] = newest
                self.known[row] = length
            for received in self.pending[row]:
                scores[number, :, : received.shape[-1]] += received.sum(-2).transpose(-1, -2)
            self.pending[row] = []
        return scores

    def committed(self, rows: slice) -> None:
        """Update the bookkeeping of some rows after a kernel has done what :meth:`commit` does."""
        for row in range(*rows.indices(len(self.lengths))):
            self.known[row], self.pending[row] = self.lengths[row], []

    def places_of(self, row: int) -> Tensor:
        """Return the number of each token of a row within its text, ``[H, slots]``, on the segment's device."""
        known, length = self.known[row], self.lengths[row]
        written = self.places.view(slice(row, row + 1))[0, :, :known, 0]
        newest = torch.arange(self.seen[row] - length + known, self.seen[row], device=self.device)
        return torch.cat([written.long(), newest.expand(self.heads, -1)], -1)

    def replace(self, rows: slice, index: Tensor) -> None:
        """See :meth:`FullSegment.replace`; the attention of the rows must have been committed."""
        for part in (self, *self.parts()):
            overwrite(part, rows, index)
        self.drop_front(rows, 1)

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the first tokens of some rows, with their scores."""
        self.commit(rows)  # pending attention numbers the slots from the front
        super().drop_front(rows, count)
        for part in self.parts():
            part.drop_front(rows, count)
        self.known[rows] = [known - count for known in self.known[rows]]

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest tokens of one row, with their scores.

        The attention that they gave to other tokens is dropped too, if it has not yet been added to the scores.
        """
        super().drop_back(row, count)
        for part in self.parts():
            part.drop_back(row, count)
        self.seen[row] -= count
        self.known[row] = min(self.known[row], self.lengths[row])
        left, steps = count, self.pending[row]
        while left and steps:  # each new token is both a query and a slot in its step's attention
            last = steps.pop()
            taken = min(left, last.shape[-2])
            if taken < last.shape[-2]:
                steps.append(last[..., : last.shape[-2] - taken, : last.shape[-1] - taken])
            left -= taken

    def keep(self, rows: slice, index: Tensor) -> None:
        """See :meth:`FullSegment.keep`; scores and places are kept with the tokens."""
        self.commit(rows)
        for part in self.parts():
            part.keep(rows, index)
            part._set(rows, 0, 0)  # appending the tokens makes room for what now stands there
        seen = self.seen[rows]
        super().keep(rows, index)
        self.seen[rows], self.known[rows] = seen, [index.shape[-1]] * len(seen)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Segment.buffers`; scores, places and pending attention count as ``index``."""
        others = [*(part.buffer for part in self.parts()), *self.rooms.values()]
        return [*super().buffers(), *(("index", buffer) for buffer in others)]

    def used(self, row: int) -> dict[str, int]:
        """See :meth:`Segment.used`; scores and places count as ``index``."""
        return {**super().used(row), "index": sum(part.used(row)["window"] for part in self.parts())}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer of the tokens; :meth:`select` and :meth:`clone` handle scores and places."""
        super().map_buffers(change)

    def select(self, index: Tensor) -> None:
        """See :meth:`Segment.select`."""
        super().select(index)
        for part in self.parts():
            part.select(index)
        chosen = index.tolist()
        self.seen, self.known = [self.seen[i] for i in chosen], [self.known[i] for i in chosen]
        self.pending = [[steps.clone() for steps in self.pending[i]] for i in chosen]
        self.rooms = {}

    def clone(self) -> ScoredSegment:
        """Return an independent copy, including the scores and the attention not yet added to them."""
        twin = super().clone()
        assert isinstance(twin, ScoredSegment)
        twin.scores, twin.places = self.scores.clone(), self.places.clone()
        twin.seen, twin.known, twin.rooms = list(self.seen), list(self.known), {}
        # copies, as the original's next step may write to the same room
        twin.pending = [[step.clone() for step in steps] for steps in self.pending]
        return twin
