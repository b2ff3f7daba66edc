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
    """Time of one call, measured over several rounds. A round is a sequence of calls that is timed as a whole.

    Args:
        us: median over the rounds, in microseconds.
        p10: 10th percentile over the rounds, in microseconds.
        p90: 90th percentile over the rounds, in microseconds.
        rounds: number of rounds.
    """

    us: float
    p10: float
    p90: float
    rounds: int

    @property
    def spread(self) -> float:
        """Relative spread of the rounds: (p90 - p10) / median; NaN if the median is 0."""
        return (self.p90 - self.p10) / self.us if self.us else float("nan")


def copies(size: int) -> int:
    """Return how many copies of a buffer to use in turn so that none is still in the L2 cache when it is read again.

    The result is between 1 and 64.

    Args:
        size: bytes of the buffer.
    """
    return max(1, min(64, -(-ROUND // max(size, 1))))


def replayed(calls: Sequence[Callable[[], object]], seconds: float = 0.25) -> Time:
    """Measure the GPU time of one call by replaying a CUDA graph that contains several equivalent calls.

    The result does not include the time that Python takes to launch kernels. It is therefore the time that the call
    takes within a decode step that runs as a CUDA graph.

    Args:
        calls: functions that do the same work, each on its own buffers (:func:`copies`). If there are fewer than 8, the
            graph contains each of them several times.
        seconds: measuring time.
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

    Rounds are repeated until their times add up to `seconds`, but at least 7 and at most 400 times.

    Args:
        run: function that launches one round.
        per_round: number of calls per round, by which the time of a round is divided.
        seconds: measuring time.
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
    """Measure the time of one call made from Python, including the time that its kernel launches take.

    Args:
        run: function that makes the call.
        seconds: measuring time.
    """
    return rounds(run, 1, seconds)
