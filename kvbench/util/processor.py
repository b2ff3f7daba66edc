"""The name of the machine's processor, and its free memory."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


@cache
def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory() -> float | None:
    """Return the bytes of the machine's memory that programs can still take; None if they are unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as handle:
            return next(float(line.split()[1]) * 1024 for line in handle if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
