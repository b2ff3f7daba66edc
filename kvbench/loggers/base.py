"""The interface of a logger, and the wrapper that keeps its failures away from the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Logger:
    """Does nothing; the base of all loggers and the logger `none`.

    Attributes:
        failed: whether something did not arrive.
    """

    failed = False

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of earlier sessions, in the order of `samples.jsonl`; called before any other method."""

    def sample(self, row: Mapping[str, Any]) -> None:
        """Take a row that was written to `samples.jsonl`."""

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Take `metrics.json` after it was written; the last call."""

    def destination(self) -> str | None:
        """Return a name of the place that the run goes to; it is sent there again only when it has changed.

        None: the logger looks by itself whether the run is there.
        """
        return None


class Safe(Logger):
    """Passes everything on; after the first failure it says so once and passes nothing on any more.

    A logger may fail in any way (network, disk, a service that went away), hence the wide except: the run's results
    are on disk already and must not be lost to it.
    """

    def __init__(self, inner: Logger, name: str, say: Callable[[str], None]) -> None:
        self._inner: Logger | None = inner
        self._name, self._say = name, say

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`Logger.begin`."""
        self._try(lambda inner: inner.begin(rows))

    def sample(self, row: Mapping[str, Any]) -> None:
        """See :meth:`Logger.sample`."""
        self._try(lambda inner: inner.sample(row))

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """See :meth:`Logger.finish`."""
        self._try(lambda inner: inner.finish(metrics))

    def destination(self) -> str | None:
        """See :meth:`Logger.destination`."""
        return self._try(lambda inner: inner.destination())

    def _try(self, call: Callable[[Logger], Any]) -> Any:
        if self._inner is None:
            return None
        try:
            return call(self._inner)
        except Exception as error:
            self._inner, self.failed = None, True
            reason = (str(error).strip().splitlines() or [""])[0]
            self._say(
                f"logger {self._name} failed ({type(error).__name__}: {reason}); the run goes on, results are on disk,"
                " and the same command sends them later"
            )
            return None
