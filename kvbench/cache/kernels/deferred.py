"""Jobs of a cache's layers that are deferred, so that alike ones share a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """Jobs of one kind of one cache.

    Attributes:
        jobs: deferred so far; None outside of :meth:`collecting`: a job is done at once.
    """

    def __init__(self) -> None:
        self.jobs: list[T] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Defer jobs inside; the caller launches them afterwards. Must not be nested."""
        assert self.jobs is None
        jobs: list[T] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None
