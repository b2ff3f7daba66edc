"""The interface of loggers, and a wrapper that keeps their failures from ending the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Logger:
    """Base class of loggers. Its methods do nothing, so it also serves as the logger ``none``.

    Attributes:
        failed: True if something could not be logged.
        local: folder on this machine that holds what :meth:`finish` has sent; None if it is elsewhere. When the folder
            is deleted, the run counts as not sent.
    """

    failed = False
    local: Path | None = None

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive the rows of `samples.jsonl` that exist before the run adds any, in file order.

        The runner calls this once, before the first :meth:`sample`. The list is empty unless the run continues an
        earlier one.
        """

    def sample(self, row: Mapping[str, Any]) -> None:
        """Log a row that has just been written to `samples.jsonl`."""

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Log the content of `metrics.json`. The runner calls this last, after it has written the file."""

    def destination(self) -> str | None:
        """Return a string that identifies where the logger sends the run, for example a service and its project.

        The runner keeps a record of what it has sent to each destination, and does not send unchanged metrics there
        again. With None it keeps no record and always calls :meth:`finish`; the logger must then recognise by itself
        what it already has.
        """
        return None


class Safe(Logger):
    """Logger that forwards every call to `inner` until one of the calls raises an exception.

    The exception is reported to the user and does not end the run; all later calls are ignored. Exceptions of every
    type are caught, because the results are already on disk and logging can be repeated.
    """

    def __init__(self, inner: Logger, name: str, say: Callable[[str], None]) -> None:
        self._inner: Logger | None = inner
        self._name, self._say = name, say

    @property
    def local(self) -> Path | None:  # type: ignore[override]
        """See :class:`Logger`."""
        return None if self._inner is None else self._inner.local

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
