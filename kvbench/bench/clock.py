"""Measurement of a GPU's kernel times, and of its read bandwidth, with which the times are compared.

Times are medians over replays of CUDA graphs, with buffers that do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kvbench.profiling.timing import median, percentile

#: smallest number of bytes that one round over all copies of the buffers reads: three times the L2 cache of an H200
ROUND = 180 << 20
#: sizes of the timed reads, MiB: the small ones give lower bounds for small operations, the largest the ceiling
SIZES = (4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Time:
    """Time of one call in microseconds: median and percentiles over rounds, each of several calls timed together."""

    us: float
    p10: float
    p90: float
    rounds: int

    @property
    def spread(self) -> float:
        """Relative spread of the rounds: (p90 - p10) / median; NaN if the median is 0."""
        return (self.p90 - self.p10) / self.us if self.us else float("nan")


def copies(size: int) -> int:
    """Return how many copies of a buffer of `size` bytes to use in turn, 1 to 64.

    With so many, none is still in the L2 cache when it is read again.
    """
    return max(1, min(64, -(-ROUND // max(size, 1))))


def replayed(calls: Sequence[Callable[[], object]], seconds: float = 0.25) -> Time:
    """Measure the GPU time of one call by replaying a CUDA graph that contains several equivalent calls.

    The result does not include the time that Python takes to launch kernels. It is therefore the time that the call
    takes within a decode step that runs as a CUDA graph.

    `calls` do the same work, each on its own buffers (:func:`copies`). If there are fewer than 8, the graph contains
    each of them several times.
    """
    calls = list(calls) * -(-8 // len(calls)) if len(calls) < 8 else list(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()  # compile and allocate before the capture
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return rounds(graph.replay, len(calls), seconds)


def rounds(run: Callable[[], object], per_round: int, seconds: float) -> Time:
    """Measure the time of one call with CUDA events, by timing rounds of several calls and dividing.

    Rounds are repeated until their times add up to `seconds`, but at least 7 and at most 400 times. `run` launches one
    round of `per_round` calls.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    medians: list[float] = []
    total = 0.0
    while (total < seconds or len(medians) < 7) and len(medians) < 400:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
        total += took / 1e3
        medians.append(took * 1e3 / per_round)
    return Time(median(medians), percentile(medians, 10), percentile(medians, 90), len(medians))


def eager(run: Callable[[], object], seconds: float = 0.25) -> Time:
    """Measure the time of one call made from Python, including the time that its kernel launches take."""
    return rounds(run, 1, seconds)


class Ceiling:
    """The GPU's read bandwidth: measured times of a kernel that does nothing but read, for several buffer sizes.

    `points` are (bytes, microseconds) for each size of buffer, smallest first; `kernel` did the reads: ``triton`` or
    ``torch.sum``.
    """

    def __init__(self, points: list[tuple[int, float]], kernel: str) -> None:
        self.points, self.kernel = points, kernel

    @property
    def rate(self) -> float:
        """Upper bound on any kernel's read bandwidth in GB/s: the bandwidth measured with the largest buffer."""
        size, us = self.points[-1]
        return size / us / 1e3

    def floor(self, size: int) -> float:
        """Return the lower bound, in microseconds, on the time in which a kernel can read `size` bytes.

        It is interpolated between the measured sizes. Above the largest, it is proportional to the size; below the
        smallest, it is the time of the smallest, which is that of a launch.
        """
        below, above = self.points[0], self.points[-1]
        if size >= above[0]:
            return above[1] * size / above[0]
        if size <= below[0]:
            return below[1]  # the time of a small read is that of its launch
        low, high = next(pair for pair in pairwise(self.points) if size <= pair[1][0])
        return low[1] + (high[1] - low[1]) * (size - low[0]) / (high[0] - low[0])

    def as_dict(self) -> dict[str, object]:
        """Return the bandwidth, the kernel's name and all measured reads as a dictionary for the JSON file."""
        rows = [{"bytes": size, "us": round(us, 3), "GB_s": round(size / us / 1e3, 1)} for size, us in self.points]
        return {"GB_s": round(self.rate, 1), "kernel": self.kernel, "reads": rows}


def measure_ceiling(seconds: float = 0.2) -> Ceiling:
    """Measure how fast this GPU can read its memory, with buffers of several sizes.

    The sizes are those of :data:`SIZES` of which 1.5 times the bytes are free; measuring takes `seconds` for each.
    """
    free = torch.cuda.mem_get_info()[0]
    points, name = [], "torch.sum"
    for mib in SIZES:
        size = mib << 20
        if size * 1.5 > free:
            break
        buffers = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(copies(size))]
        name, read = fastest_reader(buffers[0].device)
        points.append((size, replayed([partial(read, x) for x in buffers], seconds).us))
    return Ceiling(points, name)


def shown_ceiling(args: argparse.Namespace) -> Ceiling:
    """Measure the read bandwidth for a command, with ``--quick`` in a shorter time, and print it."""
    reads = measure_ceiling(0.1 if args.quick else 0.3)
    device = torch.cuda.get_device_name(0)
    print(f"{device}, {args.dtype}: plain reads {reads.rate:.0f} GB/s ({reads.kernel})", flush=True)
    return reads


def timed_cells(row: Mapping[str, Any], rate: float) -> list[float | None]:
    """Return the cells of a row that was timed; `rate` is the bandwidth of plain reads, GB/s.

    They are the microseconds, half the range from p10 to p90 in percent, the speed in GB/s, and the speed in percent of
    `rate`. The last two are None if the row does not say how many bytes were moved.
    """
    speed = row["bytes"] / row["us"] / 1e3 if row["bytes"] else None
    share = None if speed is None else 100 * speed / rate
    return [row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, share]


def fastest_reader(device: torch.device):  # type: ignore[no-untyped-def]
    """Return the name of the fastest function that reads a whole int32 buffer, and the function.

    The name is ``triton`` for a Triton kernel, or ``torch.sum`` without Triton.
    """
    try:
        from kvbench.bench.read_kernel import read_buffer
    except ImportError:
        out = torch.empty((), dtype=torch.float32, device=device)
        return "torch.sum", lambda x: torch.sum(x.view(torch.float32), dim=0, out=out)
    sink = torch.zeros(4096, dtype=torch.int32, device=device)
    return "triton", lambda x: read_buffer(x, sink)
