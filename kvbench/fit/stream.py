"""This machine's processors as a device: the rate of copies in memory and of products, measured in half a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvbench.profiling.roofline import Gpu
from kvbench.util.processor import free_memory

#: bytes that a thread copies at a time, more than its caches hold, and the rows of the timed product
COPIED, ROWS = 1 << 25, 768
TRIES = 4


def this_processor() -> Gpu:
    """Measure this machine: bytes read and written per second by all its threads at once, and FLOP/s in float32."""
    import numpy as np

    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pairs = [(np.ones(COPIED // 8), np.zeros(COPIED // 8)) for _ in range(count)]
    square = np.ones((ROWS, ROWS), dtype=np.float32)
    with ThreadPoolExecutor(count) as pool:
        copied = _least(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs)))
    rate, flops = 2 * COPIED * count / copied, 2 * ROWS**3 / _least(lambda: square @ square)
    memory = (free_memory() or 0.0) / 2**30
    return Gpu("cpu", memory, rate, flops, measured_read=rate, measured_matmul=flops, usable_gib=memory, capability=0)


def _least(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several tries; the first, which touches the memory, does not count."""
    times = []
    for _ in range(TRIES + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
