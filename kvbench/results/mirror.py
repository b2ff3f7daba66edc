"""Results on a machine without a shared folder: each file of a run is also sent to the machine that gathers them.

A job that runs elsewhere sets a mirror (:func:`mirrored`). Each :class:`kvbench.results.store.RunStore` of its process
then works on a folder of its own: it first fetches the run's files from the gathering machine, so that the run
continues from them, and sends each row and each file as soon as it has written it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Mirror(Protocol):
    """The connection to the machine that gathers results.

    Paths are those of the run's folder on that machine, as the configuration names it.
    """

    @property
    def scratch(self) -> Path:
        """Folder of this machine for the runs of this job."""

    def begin(self, folder: Path) -> dict[str, bytes]:
        """Lock a run on the gathering machine, and return its files by name; waits while another process has it."""

    def append(self, folder: Path, data: bytes) -> None:
        """Append rows to the run's `samples.jsonl`. Raises OSError."""

    def write(self, folder: Path, name: str, data: bytes) -> None:
        """Replace a file of the run. Raises OSError."""

    def end(self, folder: Path) -> None:
        """Unlock the run."""


_mirrors: list[Mirror] = []


@contextmanager
def mirrored(mirror: Mirror) -> Iterator[None]:
    """Send all runs of this process to another machine inside a ``with`` block."""
    _mirrors.append(mirror)
    try:
        yield
    finally:
        _mirrors.pop()


def current() -> Mirror | None:
    """Return the mirror of this process; None if results stay on this machine."""
    return _mirrors[-1] if _mirrors else None
