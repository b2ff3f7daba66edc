"""Recognition of out-of-memory errors, and of the size of the allocation that failed."""

from __future__ import annotations

import re
import traceback
from typing import Any

_UNITS = {"": 1, "bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

# CUDA: "Tried to allocate 20.00 GiB"; CPU: "can't allocate memory: you tried to allocate 123 bytes"
_ASKED = re.compile(r"tried to allocate\s+([\d.]+)\s*(bytes|B|KiB|MiB|GiB|TiB)?\b", re.IGNORECASE)
# a memory-mapped checkpoint: "unable to mmap 123 bytes from file"
_ASKED_MAPPED = re.compile(r"unable to mmap\s+([\d.]+)\s*(bytes)\b")
# numpy: "Unable to allocate 7.28 TiB for an array"
_ASKED_NUMPY = re.compile(r"Unable to allocate\s+([\d.]+)\s*(bytes|B|KiB|MiB|GiB|TiB)\b")
#: parts of messages from the CPU's allocator, and from CUDA when a shared device has too little memory for a context
_SIGNS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that the GPU or this process has run out of memory.

    Besides MemoryError and torch's OutOfMemoryError, this recognises other exceptions by their messages, and an error
    that such an exception has caused during the capture of a CUDA graph.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, (RuntimeError, OSError)) and any(sign in str(error) for sign in _SIGNS):
        return True
    if isinstance(error, SystemError) and "without" in str(error) and "exception" in str(error):
        return _limited()  # a C extension whose allocation failed and that set no exception
    # running out of memory during a CUDA graph capture raises a second error, with the first as its context
    return isinstance(error, RuntimeError) and error.__context__ is not None and is_out_of_memory(error.__context__)


def _limited() -> bool:
    """Return True if this process's memory is limited (runtime.memory_limit_gb on a CPU, or ``ulimit -d``)."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def bytes_asked(error: BaseException) -> int | None:
    """Return the size in bytes of a failed allocation from its exception's message; None if the message lacks it."""
    matches = (pattern.search(str(error)) for pattern in (_ASKED, _ASKED_NUMPY, _ASKED_MAPPED))
    match = next(filter(None, matches), None)
    return None if match is None else int(float(match[1]) * _UNITS[match[2] or ""])


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return ``type``, ``message`` and ``traceback`` of an exception, as JSON data for `metrics.json`.

    The message is cut to its first 4,000 characters, and the traceback to its last 8,000.
    """
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "message": str(error)[:4000], "traceback": trace[-8000:]}
