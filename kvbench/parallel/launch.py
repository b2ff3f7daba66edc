"""What torchrun told this process; imports no torch, so that a configuration is checked in a moment."""

from __future__ import annotations

import os


def size() -> int:
    """Processes that were started together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) if launched() else 1


def rank() -> int:
    """The number of this process among them; number 0 speaks and writes for all."""
    return int(os.environ.get("RANK", 0)) if launched() else 0


def local_rank() -> int:
    """The number of this process on its machine, which is that of its device."""
    return int(os.environ.get("LOCAL_RANK", 0)) if launched() else 0


def local_size() -> int:
    """Processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def launched() -> bool:
    """Whether torchrun (or anything that sets the same variables) started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
