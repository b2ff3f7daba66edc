"""Times on the device: medians of replayed CUDA graphs over buffers that do not fit the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvbench.profiling.timing import median, percentile

#: bytes that one round over all copies of the buffers reads at least: three times the L2 of an H200
ROUND = 180 << 20


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median, 10th and 90th percentile over rounds, and how many rounds there were."""

    us: float
    p10: float
    p90: float
    rounds: int

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.us if self.us else float("nan")


def copies(size: int) -> int:
    """Return how many copies of buffers of `size` bytes exceed the cache, so that none is read from it; at most 64."""
    return max(1, min(64, -(-ROUND // max(size, 1))))


def replayed(calls: Sequence[Callable[[], object]], seconds: float = 0.25) -> Time:
    """Time of a call: `calls` do the same on buffers of their own and are captured into one graph, back to back.

    A graph of several calls also hides the launches; a call in a decode step is part of a graph too.
    """
    calls = list(calls) * -(-8 // len(calls)) if len(calls) < 8 else list(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()  # compiles, allocates
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return rounds(graph.replay, len(calls), seconds)


def rounds(run: Callable[[], object], per_round: int, seconds: float) -> Time:
    """Run until `seconds` have been measured; the time of a round is shared by the `per_round` calls in it."""
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
    """Time of a call as Python makes it, launches included."""
    return rounds(run, 1, seconds)
