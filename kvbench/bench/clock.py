"""Times on the GPU: medians over replays of CUDA graphs, with buffers that do not fit into the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvbench.profiling.timing import median, percentile

#: smallest number of bytes that one round over all copies of the buffers reads: three times the L2 cache of an H200
ROUND = 180 << 20


@dataclass(frozen=True)
class Time:
    """Time of one call in microseconds, median and percentiles over rounds: sequences of calls timed as a whole."""

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
    round, by whose number of calls, `per_round`, its time is divided.
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
