"""The interface of loggers, a wrapper that keeps their failures from ending the run, and the units of their charts."""

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


MIB = 2**20

#: parts of a name that stand for a size in bytes, with the name of the same size in MiB
_SIZES = {
    "kv_bytes": "kv_MiB",
    "peak_bytes": "peak_MiB",
    "kv_used": "kv_used_MiB",
    "kv_reserved": "kv_reserved_MiB",
    "kv_fp16": "kv_fp16_MiB",
    "peak": "peak_MiB",
    "peak_prefill": "peak_prefill_MiB",
    "peak_decode": "peak_decode_MiB",
    "read_bytes": "read_MiB",
    "bytes_asked": "asked_MiB",
}
#: last parts of names that are counts, ratios or words, even below a size or a time
_UNITLESS = ("n", "ratio", "kind", "lengths")


def charted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and texts under names with units that a chart can show; slashes separate the parts of a name.

    ``kv_bytes/used/total`` becomes ``kv_MiB/used/total``, ``ttft_s/median`` becomes ``ttft_ms/median``. Ratios to fp16
    (below ``vs_fp16``) and rates such as ``tokens_per_s`` stay as they are. Counts and ratios lose the unit of the
    group that they are in: ``kv_bytes/ratio`` becomes ``kv/ratio``, ``ttft_s/n`` becomes ``ttft/n``.
    """
    return dict(_charted(name, value) for name, value in values.items())


def _charted(name: str, value: Any) -> tuple[str, Any]:
    parts = name.split("/")
    if "vs_fp16" in parts:
        return name, value
    for i, part in enumerate(parts):
        time = part.endswith("_s") and not part.endswith(("per_s", "GB_s"))
        if not time and part not in _SIZES:
            continue
        if parts[-1] in _UNITLESS:
            bare = part.removesuffix("_s").removesuffix("_bytes")
            return "/".join([*parts[:i], bare, *parts[i + 1 :]]), value
        unit = f"{part.removesuffix('_s')}_ms" if time else _SIZES[part]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = value * 1000 if time else value / MIB
        return "/".join([*parts[:i], unit, *parts[i + 1 :]]), value
    return name, value
