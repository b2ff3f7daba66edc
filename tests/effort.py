"""Seconds of the processor: what a command costs, whatever else the machine is doing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Effort:
    """Filled in when the block of :func:`effort` ends."""

    seconds: float = 0.0


@contextmanager
def effort() -> Iterator[Effort]:
    """User and system time of this process and of the processes that it started and waited for."""
    spent, before = Effort(), os.times()
    yield spent
    after = os.times()
    spent.seconds = sum(after[:4]) - sum(before[:4])
