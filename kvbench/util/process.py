"""Processes of this machine: whether one that left its number somewhere still runs."""

from __future__ import annotations

import os


def began(process: int) -> str | None:
    """Return a text that identifies a running process even if its number is used again; None if it does not run.

    On Linux it is the time at which the process began; elsewhere all running processes have the same text.
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
