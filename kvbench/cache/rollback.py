"""Rollback of the newest tokens, and the check that they may be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.cache.state import LayerState
from kvbench.errors import CacheError


class Rollback(LayerState):
    """A layer whose newest tokens, such as rejected drafts, can be taken back until it packs or drops older ones."""

    def take_back(self, counts: Sequence[int]) -> None:
        """Take back the newest tokens of each row; see :meth:`KVCache.take_back`.

        Args:
            counts: for each row, the number of tokens to take back.

        Raises:
            CacheError: the prompt is not complete; or, since one of these tokens arrived, the layer has packed or
                dropped tokens, which cannot be undone. (The methods ``atom`` and ``kvquant`` pack each token on its
                own, so they can take back any token.)
        """
        least, stores = min(counts), self.stores()
        for row, count in enumerate(counts):
            available = min(self.seen - self.firm[row], sum(stores[0].signature(row)))
            if self.method.gives_tail and self.window is None:
                available = max(available, min(store.tail.lengths[row] for store in stores))
            if count > available:
                raise CacheError(
                    f"cannot take back {count} tokens: in row {row} of layer {self.index}, only the newest {available} "
                    "can be removed, because the cache has already packed or dropped tokens. Roll back before the next "
                    "step and before bill()"
                )
        for row, count in enumerate(counts):
            for store in stores:
                store.drop_back(row, count)
            order = self.order[row]
            if order is not None:  # every row ends at the last column: rows that lose more than the least shift right
                self.order[row] = order[..., : sum(stores[0].signature(row))] + (count - least)
            self.firm[row] += count - least
        self.seen -= least
        self.firm[:] = [min(firm, self.seen) for firm in self.firm]

    def lengths(self, rows: slice) -> list[tuple[int, ...]]:
        """Return the number of tokens in each segment, as one tuple for the keys and one for the values.

        Args:
            rows: rows of the batch, which must all have the same numbers.
        """
        row = rows.indices(self.batch)[0]
        return [store.signature(row) for store in self.stores()]

    def note_moves(self, rows: slice, before: list[tuple[int, ...]] | None) -> None:
        """Record that the tokens seen so far can no longer be taken back, if an operation packed or dropped any token.

        The record is :attr:`firm`. It is also updated for a method that adds up the attention of every step
        (``Method.observe_steps``), since that sum cannot be undone.

        Args:
            rows: rows of the batch to which the operation was applied.
            before: the result of :meth:`lengths` before the operation; None if the operation has placed prompt tokens.
        """
        row = rows.indices(self.batch)[0]
        after, seen = self.lengths(rows), self.real_tokens(row)
        slots = min(map(sum, after))
        if before is None:
            moved = slots < seen or (any(any(lengths[:-1]) for lengths in after) and not self.method.by_token)
        else:
            moved = after != before and not (self.method.by_token and slots == min(map(sum, before)))
        if moved or self.method.observe_steps:
            self.firm[rows] = [self.seen] * len(self.firm[rows])
