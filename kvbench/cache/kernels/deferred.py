"""Queue of deferred jobs of a cache's layers, so that identical jobs share a kernel launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """Queue of the jobs of one kind (packing or rolling) of one cache.

    Attributes:
        jobs: the jobs deferred so far; None outside of :meth:`collecting`, where jobs are done at once.
    """

    def __init__(self) -> None:
        self.jobs: list[T] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Yield the list of the jobs that are deferred within the context, which the caller must launch afterwards.

        Contexts must not be nested.
        """
        assert self.jobs is None
        jobs: list[T] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None
