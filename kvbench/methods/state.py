"""State that a method keeps for one cache, in addition to the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass
class CacheState:
    """State of a method for one cache; here one without anything of single rows.

    ``new_cache`` puts it into ``cache.progress.method_state``.
    """

    def select(self, order: Sequence[int]) -> None:
        """Make the rows `order` the batch, repeats allowed."""

    def clone(self) -> Self:
        """Return a copy whose rows may be selected independently."""
        return self
