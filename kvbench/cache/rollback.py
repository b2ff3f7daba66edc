"""Rollback of the newest tokens, and the check that they may be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.cache.state import LayerState
from kvbench.errors import CacheError


class Rollback(LayerState):
    """The rollback part of a layer of the cache: it removes the newest tokens again, such as rejected drafts.

    Only tokens that have arrived since the layer last packed or dropped others can be removed.
    """

    def take_back(self, counts: Sequence[int]) -> None:
        """Remove the newest tokens of each row from this layer; :meth:`kvbench.cache.KVCache.take_back` calls this.

        Raises:
            CacheError: the prompt is not complete; or the layer has packed or dropped tokens since one of these
                arrived, which cannot be undone. (The methods ``atom`` and ``kvquant`` can remove any token, because
                they pack each one on its own.)
        """
        least, stores = min(counts), self.stores()
        for row, count in enumerate(counts):
            available = min(self.seen - self.firm[row], sum(stores[0].signature(row)))
            # the tail's tokens are as they arrived; with a window, however, older ones that would show again are gone
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
        """Return the number of tokens in each segment: a tuple for the keys, then a tuple for the values.

        All of `rows` must have the same numbers.
        """
        row = rows.indices(self.batch)[0]
        return [store.signature(row) for store in self.stores()]

    def note_moves(self, rows: slice, before: list[tuple[int, ...]] | None) -> None:
        """Mark all tokens of some rows as firm (no longer removable) if an operation packed or dropped tokens.

        With a method that packs each token on its own (``Method.by_token``), only dropping counts. With one that sums
        up the attention of steps (``Method.observe_steps``), every operation counts, because the sum cannot be undone.
        `before` is the result of :meth:`lengths` before the operation; None if the operation has placed prompt tokens.
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
