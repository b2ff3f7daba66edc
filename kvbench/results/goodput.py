"""Simulated goodput of a server: requests arrive at random, and steps take the times that were recorded.

Nothing here is measured under load. Arrivals are drawn as ``vllm bench serve`` draws them: gaps of a gamma distribution
with mean 1 / rate, whose shape is the burstiness (1: a Poisson process). The server is simple: requests start in the
order in which they came; a prefill runs alone and goes before decoding; then all started sequences decode together, a
token per step; the time of a step depends only on the number of sequences; no more sequences run at once than had room
in memory in the recorded run.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Served:
    """A request that was served: when it arrived, and when its first and its last token came, in seconds."""

    arrival: float
    first: float
    end: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token, the wait in the queue included."""
        return self.first - self.arrival

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def e2el_s(self) -> float:
        """Time from the arrival to the last token."""
        return self.end - self.arrival


@dataclass(frozen=True)
class Limits:
    """Limits in seconds on the times of a request; a request that keeps all is good. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def kept(self, request: Served) -> bool:
        """Return True if a request keeps every limit."""
        pairs = (
            (self.ttft_s, request.ttft_s),
            (self.tpot_s, request.tpot_s),
            (self.e2el_s, request.e2el_s),
        )
        return all(limit is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Server:
    """The recorded times of a method in seconds: of the prefill of a request, and of a decode step by batch size.

    Between two batch sizes the time is interpolated linearly; below the smallest, it is the time of the smallest. At
    most `most` sequences run at a time; `most` is at most the largest batch size.
    """

    prefill_s: float
    step_s: Mapping[int, float]
    most: int

    def step(self, batch: int) -> float:
        """Return the seconds of a step with `batch` sequences."""
        sizes = sorted(self.step_s)
        if batch <= sizes[0]:
            return self.step_s[sizes[0]]
        for low, high in pairwise(sizes):
            if batch <= high:
                share = (batch - low) / (high - low)
                return self.step_s[low] * (1 - share) + self.step_s[high] * share
        raise ValueError(f"a step of {batch} sequences was not recorded, only up to {sizes[-1]}")


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Draw the times in seconds at which `count` requests arrive, `rate` per second; at once if `rate` is infinite.

    `burstiness` is the shape of the gamma distribution of the gaps; 1 is a Poisson process, less is burstier.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times


def simulate(times: Sequence[float], tokens: int, server: Server) -> list[Served]:
    """Serve requests and return when each got its first and its last token, in the order of their arrival.

    `times` are the times of arrival in ascending order; every answer has `tokens` tokens.
    """
    waiting = deque(enumerate(times))
    running: dict[int, int] = {}
    first, end = [0.0] * len(times), [0.0] * len(times)
    now = 0.0
    while waiting or running:
        if waiting and waiting[0][1] <= now and len(running) < server.most:
            number, _ = waiting.popleft()
            now += server.prefill_s
            first[number] = end[number] = now
            if tokens > 1:
                running[number] = tokens - 1
        elif running:
            now += server.step(len(running))
            for number in list(running):
                running[number] -= 1
                if not running[number]:
                    del running[number]
                    end[number] = now
        else:
            now = waiting[0][1]
    return [Served(*all_times, tokens) for all_times in zip(times, first, end, strict=True)]


def goodput(requests: Sequence[Served], limits: Limits) -> float:
    """Return the number of requests that keep every limit, per second from time 0 to the last token.

    There must be at least one request.
    """
    return sum(limits.kept(request) for request in requests) / max(request.end for request in requests)
