"""The points at which speculation is measured."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """A model, a batch size and a number of tokens in the cache at the beginning.

    Args:
        model: preset of the model.
        batch: number of sequences.
        context: tokens of each sequence.
    """

    model: str
    batch: int
    context: int
