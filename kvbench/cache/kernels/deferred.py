"""Queue of deferred jobs of a cache's layers, so that identical jobs share a kernel launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A queue of deferred jobs of one kind (packing or rolling) of one cache.

    Attributes:
        jobs: the jobs deferred so far; None outside :meth:`collecting`, where a job is done at once.
    """

    def __init__(self) -> None:
        self.jobs: list[T] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Defer the jobs that arise inside the context. The caller must launch them afterwards.

        Contexts must not be nested.

        Yields:
            The list of the jobs, which grows inside the context.
        """
        assert self.jobs is None
        jobs: list[T] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None
