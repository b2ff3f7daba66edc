"""Compression, speed-up and the bound on it, computed by hand."""

from __future__ import annotations

import pytest

from kvbench.results.same_work import allocated_compression, cache_bound, nominal_compression, same_work_ratio


def test_nominal_compression_is_that_of_the_formats():
    assert nominal_compression(4, 4) == 4 and nominal_compression(2, 2) == 8
    # a quarter of the layers in bf16, the others k4v2: 1 / (1/4 + 3/4 * 6/32)
    mixed = 0.25 * 16
    assert nominal_compression(mixed + 0.75 * 4, mixed + 0.75 * 2) == pytest.approx(1 / (0.25 + 0.75 * 6 / 32))
    assert nominal_compression(8, 8, full_bits=32) == 4


def test_allocated_compression_counts_all_memory_beyond_the_weights():
    assert allocated_compression(full_bytes=800, peak=1200, weights=1000) == 4


def test_the_bound_of_the_cache_by_hand():
    """20 ms, of which 10 ms read 40 GB at 4 TB/s: a cache of 10 GB read at 5 TB/s leaves 12 ms."""
    assert cache_bound(0.020, 40e9, 4e12, 10e9, 5e12) == pytest.approx(0.020 / 0.012)
    assert same_work_ratio(0.020, 0.016) == pytest.approx(1.25)
    # nothing is gained if fp16's own cache is already read at the peak rate
    assert cache_bound(0.020, 40e9, 5e12, 40e9, 5e12) == pytest.approx(1)
