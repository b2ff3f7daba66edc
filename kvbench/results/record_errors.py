"""Records of failures in `metrics.json`: memory that ran out, and errors."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.results.typed import key


@dataclass(frozen=True, kw_only=True)
class Oom:
    """The allocation that failed for lack of memory: its size, the id of the running sample, and the code by part."""

    bytes_asked: int | None = key(minimum=0)
    sample: str | None = None
    message: str = ""
    code: dict[str, str | None] | None = key("digests of the code that ran out of memory", optional=True)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error during a run; `type` is the exception's class, and `sample` None if no sample was running."""

    sample: str | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
