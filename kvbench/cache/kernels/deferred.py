"""Queue of deferred jobs of a cache's layers, so that identical jobs share a kernel launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A queue in which the layers of a cache collect device work of one kind, so that several layers share a launch.

    The work is either the packing of tokens or the moves of rolling windows.

    Attributes:
        jobs: the jobs collected so far; None outside :meth:`collecting`, where a job must be run at once instead.
    """

    def __init__(self) -> None:
        self.jobs: list[T] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Within a ``with`` block, collect jobs in the list that it yields instead of running them.

        The caller must run them afterwards. Blocks must not be nested.
        """
        assert self.jobs is None
        jobs: list[T] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None
