"""State that a method keeps for one cache."""

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
        """Follow a change of the batch (beam search, for example): new row i was row ``order[i]``.

        Rows may be dropped or repeated.
        """

    def clone(self) -> Self:
        """Return the state for a copy of the cache. Changes to the rows of one must not affect the other."""
        return self
