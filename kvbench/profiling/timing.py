"""Clocks for code that runs asynchronously on a device, and the figures that are reported from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done what was asked of it; nothing on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device | str = "cpu") -> float:
    """Return seconds on a monotonic clock, after the device has finished."""
    synchronize(device)
    return time.perf_counter()


@dataclass
class Elapsed:
    """Filled when the block of :func:`timed` ends."""

    seconds: float = math.nan


@contextmanager
def timed(device: torch.device | str = "cpu") -> Iterator[Elapsed]:
    """Time a block, with the device drained before and after it."""
    elapsed = Elapsed()
    start = now(device)
    yield elapsed
    elapsed.seconds = now(device) - start


def median(values: Sequence[float]) -> float:
    """Return the median; NaN for no values."""
    return percentile(values, 50)


def p99(values: Sequence[float]) -> float:
    """99th percentile; NaN for no values."""
    return percentile(values, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile with linear interpolation between the neighbours (numpy's default); NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
