"""Cells of a table: their width, and sizes and times with three digits."""

from __future__ import annotations

import pytest

from kvbench.util.table import Cell, seconds, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (2_915_000, "2.78 MiB"),
        (80 * 2**30, "80 GiB"),
        (1000 * 2**30, "0.977 TiB"),
        (5000 * 2**40, "5e+03 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_a_size_has_a_unit_that_leaves_three_digits(count: float | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [(None, "-"), (0.0, "0 ms"), (0.00012345, "0.123 ms"), (0.9994, "999 ms"), (1.0, "1.00 s"), (75.456, "75.46 s")],
)
def test_a_time_is_in_seconds_from_one_on(time: float | None, text: str) -> None:
    assert seconds(time) == text


def test_a_cell_is_as_wide_as_its_longer_line() -> None:
    assert Cell("0.875", "Δ −.125 ±.125").width == len("Δ −.125 ±.125")
    assert Cell("1.61 MiB").width == 8
    assert Cell("").width == 0
