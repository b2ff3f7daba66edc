"""Records of failures in `metrics.json`: memory that ran out, and errors."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.results.typed import key


@dataclass(frozen=True, kw_only=True)
class Oom:
    """The allocation with which a run ran out of memory.

    Args:
        bytes_asked: size of the allocation that failed.
        sample: id of the sample that was running.
        message: text of the error.
        code: digests of the code that was running, by part.
    """

    bytes_asked: int | None = key(minimum=0)
    sample: str | None = None
    message: str = ""
    code: dict[str, str | None] | None = key("digests of the code that ran out of memory", optional=True)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error during a run.

    Args:
        sample: id of the sample that raised it; None if no sample was running.
        type: name of the exception's class.
        message: text of the error.
        traceback: Python's traceback.
    """

    sample: str | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
