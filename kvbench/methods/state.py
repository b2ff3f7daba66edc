"""State that a method keeps for one cache, in addition to the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass
class CacheState:
    """Base of the state that a method keeps for one cache, in ``cache.progress.method_state``.

    The method's ``new_cache`` assigns it. This class is for state that does not depend on the rows of the batch. A
    subclass with state per row overrides both methods.
    """

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated. This implementation does nothing.

        Args:
            order: for each row of the new batch, the index of its row in the old batch.
        """

    def clone(self) -> Self:
        """Return a copy whose rows can change independently. This implementation returns the state itself."""
        return self
