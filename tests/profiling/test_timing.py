"""Clocks and the figures that are reported from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.profiling import timing


def test_percentiles_as_numpy():
    values = list(np.random.default_rng(0).random(101))
    assert timing.median(values) == pytest.approx(np.median(values))
    assert timing.p99(values) == pytest.approx(np.percentile(values, 99))
    assert math.isnan(timing.p99([]))
    assert timing.median([3.0, 1.0, 2.0, 10.0]) == 2.5 and math.isnan(timing.median([]))
    assert [timing.percentile([2.0, 1.0], q) for q in (0, 25, 100)] == [1.0, 1.25, 2.0]
    assert timing.p99([7.0]) == 7.0


def test_a_gpu_is_waited_for_before_each_reading(monkeypatch):
    events = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: events.append(str(device)))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(events.append("clock") or len(events)))
    with timing.timed("cuda:1") as elapsed:
        assert math.isnan(elapsed.seconds)
        events.append("work")
    assert events == ["cuda:1", "clock", "work", "cuda:1", "clock"] and elapsed.seconds == 3.0
    timing.synchronize("cpu")
    assert timing.now() == 6.0 and len(events) == 6
