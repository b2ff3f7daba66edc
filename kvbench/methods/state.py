"""State that a method keeps for one cache, in addition to the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass
class CacheState:
    """Base class for data that a method needs during the life of one cache, in addition to keys and values.

    The method's ``new_cache`` stores an instance in ``cache.progress.method_state``. A subclass whose data differ from
    row to row of the batch overrides :meth:`select` and :meth:`clone`; others need not override anything.
    """

    def select(self, order: Sequence[int]) -> None:
        """Follow a change of the batch, in which rows are reordered, dropped or repeated (beam search, for example).

        This implementation does nothing.

        Args:
            order: for each row of the new batch, its index in the old batch.
        """

    def clone(self) -> Self:
        """Return the state for a copy of the cache. Changes to the rows of one must not affect the other.

        This implementation returns the object itself, because it has no data by row.
        """
        return self
