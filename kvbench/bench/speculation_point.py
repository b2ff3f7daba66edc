"""The point at which speculation is measured."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """A preset of a model, a batch size and a number of tokens in the cache of each sequence at the beginning."""

    model: str
    batch: int
    context: int
