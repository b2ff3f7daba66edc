"""The machine's processor, its free memory, and whether a process still runs."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


def _about(field: str) -> str:
    """Return a field of the first processor in ``/proc/cpuinfo``; empty if it is not known."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(field):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


@cache
def cpu_name() -> str:
    """Return the processor's model name."""
    return _about("model name") or platform.processor() or platform.machine()


@cache
def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets, as Linux calls them; empty elsewhere."""
    return frozenset(_about("flags").split())


def free_memory() -> float | None:
    """Return the bytes of the machine's memory that programs can still allocate; None if they are unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as handle:
            return next(float(line.split()[1]) * 1024 for line in handle if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def began(process: int) -> str | None:
    """Return a text that differs from that of any later process with the same id; None if the process does not run.

    On Linux the text is the time at which the process began; elsewhere all running processes have the same text.
    """
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as handle:
            state, *rest = handle.read().rpartition(")")[2].split()
            return None if state == "Z" else rest[18]
    except (OSError, IndexError, ValueError):
        pass
    if os.path.isdir("/proc/self"):
        return None
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass  # it runs, as another user
    return "running"
