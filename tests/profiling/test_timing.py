"""Clocks and the figures that are reported from them."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from kvbench.profiling import timing


def test_timed():
    with timing.timed() as elapsed:
        time.sleep(0.02)
    assert 0.02 <= elapsed.seconds < 20


def test_percentiles_as_numpy():
    values = list(np.random.default_rng(0).random(101))
    assert timing.median(values) == pytest.approx(np.median(values))
    assert timing.p99(values) == pytest.approx(np.percentile(values, 99))
    assert math.isnan(timing.p99([]))
