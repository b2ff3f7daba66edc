"""Clocks for code that runs asynchronously on a device, and percentiles of the times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def synchronize(device: torch.device | str) -> None:
    """Wait until a CUDA device has finished all queued work. For any other device, return at once."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device | str = "cpu") -> float:
    """Wait for the device to finish, then read a monotonic clock in seconds."""
    synchronize(device)
    return time.perf_counter()


@dataclass
class Elapsed:
    """A duration in seconds, which :func:`timed` fills in at the end of its ``with`` block; NaN until then."""

    seconds: float = math.nan


@contextmanager
def timed(device: torch.device | str = "cpu") -> Iterator[Elapsed]:
    """Measure the time spent inside a ``with`` block; ``seconds`` is set when the block ends.

    The device finishes all queued work before each reading of the clock.
    """
    elapsed = Elapsed()
    start = now(device)
    yield elapsed
    elapsed.seconds = now(device) - start


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return percentile(values, 50)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile; NaN if there are no values."""
    return percentile(values, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile (q: 0 to 100), interpolated linearly as by numpy's default; NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
