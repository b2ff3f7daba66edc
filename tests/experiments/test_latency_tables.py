"""Cells of the tables of docs/bytes-and-latency.md: spreads, break-even lengths, alignment."""

from __future__ import annotations

from experiments.efficiency.latency import even, spread
from experiments.stored import grid


def test_a_spread_is_half_the_range_over_processes():
    assert spread([1.0e-3, 1.5e-3, 1.2e-3], 1e3, 2) == " ±0.25"
    assert spread([1.0], 1) == "" and spread([], 1) == ""


def test_break_even_lengths_with_their_range():
    assert even({}) == "-"
    assert even({"break_even": None, "break_evens": [None, None]}) == "none"
    assert even({"break_even": 6061.4, "break_evens": [5999.0, 6097.0, None]}) == "6,061 (5,999 to 6,097)"
    assert even({"break_even": 0, "break_evens": [0.0, 0.0]}) == "any"


def test_tables_align_numbers_to_the_right():
    assert grid(["a", "b"], [["x", "1"]]) == "| a | b |\n|:--|--:|\n| x | 1 |\n"
