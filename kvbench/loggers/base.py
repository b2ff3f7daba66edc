"""What a logger is told, and the wrapper that keeps its failures away from the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Logger:
    """Does nothing; the base of all loggers and the logger `none`."""

    def sample(self, row: Mapping[str, Any]) -> None:
        """A row was written to `samples.jsonl`."""

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """`metrics.json` was written; no call comes after it."""


class Safe(Logger):
    """Passes everything on; after the first failure it says so once and passes nothing on any more.

    A logger may fail in any way (network, disk, a service that went away), hence the wide except: the run's results
    are on disk already and must not be lost to it.
    """

    def __init__(self, inner: Logger, name: str, say: Callable[[str], None]) -> None:
        self._inner: Logger | None = inner
        self._name, self._say = name, say

    def sample(self, row: Mapping[str, Any]) -> None:
        """See :meth:`Logger.sample`."""
        self._try(lambda inner: inner.sample(row))

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """See :meth:`Logger.finish`."""
        self._try(lambda inner: inner.finish(metrics))

    def _try(self, call: Callable[[Logger], None]) -> None:
        if self._inner is None:
            return
        try:
            call(self._inner)
        except Exception as error:
            self._inner = None
            reason = (str(error).strip().splitlines() or [""])[0]
            self._say(
                f"logger {self._name} failed ({type(error).__name__}: {reason}); the run goes on, results are on disk"
            )
