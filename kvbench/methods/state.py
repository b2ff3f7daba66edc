"""State that a method keeps for one cache, in addition to the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass
class CacheState:
    """State of a method for one cache, stored by ``new_cache`` in ``cache.progress.method_state``.

    This base is for state that does not depend on the rows; a subclass with state per row overrides both methods.
    """

    def select(self, order: Sequence[int]) -> None:
        """Replace the batch by its rows `order`, which may repeat rows; nothing to do here."""

    def clone(self) -> Self:
        """Return a copy whose rows can be selected independently; here the state itself."""
        return self
