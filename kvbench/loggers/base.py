"""The interface of loggers, and a wrapper that keeps their failures from ending the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Logger:
    """Base class of loggers. Its methods do nothing, so it also serves as the logger ``none``.

    Attributes:
        failed: True if something could not be logged.
    """

    failed = False

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive the rows that are already stored, in the order of `samples.jsonl`; called once, before any row."""

    def sample(self, row: Mapping[str, Any]) -> None:
        """Log a row that has just been written to `samples.jsonl`."""

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Log the content of `metrics.json` after it was written; called last."""

    def destination(self) -> str | None:
        """Return a name for the place to which the logger sends the run.

        The runner does not send an unchanged run to the same place again. None means that the logger itself checks
        whether it already has the run.
        """
        return None


class Safe(Logger):
    """Wrapper that forwards calls to a logger until it fails; the failure is reported and does not end the run.

    All exceptions are caught (network, disk, an unavailable service), because the results are already on disk.

    Args:
        inner: logger to which calls are forwarded.
        name: name of the logger, for the report.
        say: function that shows the report to the user.
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
                f"logger {self._name} failed ({type(error).__name__}: {reason}); the run continues and its results"
                " are on disk; run the same command again later to send them"
            )
            return None
