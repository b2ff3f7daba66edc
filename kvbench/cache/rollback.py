"""Tokens that are taken back, and which of them may be."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.cache.state import LayerState
from kvbench.errors import CacheError


class Rollback(LayerState):
    """A layer whose newest tokens may be taken back (rejected drafts), as long as nothing has moved since they came."""

    def take_back(self, counts: Sequence[int]) -> None:
        """Take back the newest ``counts[row]`` tokens of each row of a placed prompt; see :meth:`KVCache.take_back`.

        Raises:
            CacheError: something has moved since one of them came: a token was packed, thinned out or evicted that
                would still be where it was (``atom`` and ``kvquant`` pack each token by itself and take back any).
        """
        least, stores = min(counts), self.stores()
        for row, count in enumerate(counts):
            available = min(self.seen - self.firm[row], sum(stores[0].signature(row)))
            if self.method.gives_tail and self.window is None:
                available = max(available, min(store.tail.lengths[row] for store in stores))
            if count > available:
                raise CacheError(
                    f"cannot take back {count} tokens: of row {row} of layer {self.index} only the newest {available} "
                    "can go, since the cache has packed or dropped tokens for those before. Roll back before the next "
                    "step and before bill()"
                )
        for row, count in enumerate(counts):
            for store in stores:
                store.drop_back(row, count)
            order = self.order[row]
            if order is not None:  # the row's columns move to the right by what it gave back more than others
                self.order[row] = order[..., : sum(stores[0].signature(row))] + (count - least)
            self.firm[row] += count - least
        self.seen -= least
        self.firm[:] = [min(firm, self.seen) for firm in self.firm]

    def lengths(self, rows: slice) -> list[tuple[int, ...]]:
        """Return the tokens in each segment of the keys and of the values of `rows`, which agree."""
        row = rows.indices(self.batch)[0]
        return [store.signature(row) for store in self.stores()]

    def note_moves(self, rows: slice, before: list[tuple[int, ...]] | None) -> None:
        """Make the tokens of `rows` seen so far firm, if any has moved: they cannot be taken back any more.

        Args:
            before: :meth:`lengths` before tokens may have moved; None: nothing was held, a prompt was placed.
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
