"""Exceptions that cross a process boundary: described as plain data in a worker, and raised again by its parent."""

from __future__ import annotations

import traceback
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.util.failures import is_out_of_memory


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker process, as the cause of the exception that its parent raises."""


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data, from which :func:`rebuilt` makes an exception of the same name and message."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "oom": is_out_of_memory(error),
        "exit_code": error.exit_code if isinstance(error, KvbenchError) else None,
    }


def rebuilt(failure: dict[str, Any]) -> Exception:
    """Return an exception like one that a worker process raised, which :func:`described` describes.

    Its class has the same name and is derived from KvbenchError and MemoryError if those describe the original, so that
    it is shown, recorded and handled like an exception of this process.
    """
    bases: list[type[Exception]] = []
    if failure["exit_code"] is not None:
        bases.append(KvbenchError)
    if failure["oom"]:
        bases.append(MemoryError)
    attributes = {} if failure["exit_code"] is None else {"exit_code": failure["exit_code"]}
    error: Exception = type(failure["kind"], tuple(bases) or (RuntimeError,), attributes)(failure["message"])
    error.__cause__ = WorkerTraceback("in a worker process:\n" + failure["traceback"])
    return error
