"""Rank of this process and number of processes under torchrun. Does not import torch, so checks are fast."""

from __future__ import annotations

import os

from kvbench.errors import ConfigError


def size() -> int:
    """Return the number of processes in the run; 1 without torchrun."""
    return _environment_number("WORLD_SIZE", 1) if launched() else 1


def rank() -> int:
    """Return the rank of this process in the run; 0 without torchrun. Only rank 0 prints and writes results."""
    return _environment_number("RANK", 0) if launched() else 0


def local_rank() -> int:
    """Return the rank of this process on its machine, which is also the index of its GPU; 0 without torchrun."""
    return _environment_number("LOCAL_RANK", 0) if launched() else 0


def local_size() -> int:
    """Return the number of processes of the run on this machine; 1 without torchrun."""
    return _environment_number("LOCAL_WORLD_SIZE", size())


def launched() -> bool:
    """Return True if torchrun, or a launcher that sets the same environment variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def _environment_number(name: str, default: int) -> int:
    """Return the number in the environment variable `name`, or `default`; ConfigError if it is not a whole number."""
    text = os.environ.get(name, str(default)).strip()
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            name,
            text,
            "must be a whole number, 0 or greater (torchrun sets this variable)",
            hint=f"unset {name}, or start the command with torchrun",
        )
    return int(text)
