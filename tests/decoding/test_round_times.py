"""Counts and times of rounds, summed over rows and rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.decoding.round_times import Round, totals

TIMES = {"draft_seconds": 1.0, "verify_seconds": 0.5, "flush_seconds": 0.25}
ROUNDS = [
    Round(9.0, [10, 10], [4, 4], [4, 4], [5, 5], **TIMES),  # the first one does not count
    Round(2.0, [15, 15], [4, 4], [4, 1], [5, 2], **TIMES),
    Round(3.0, [20, 17], [2, 4], [2, 0], [1, 1], **TIMES),  # row 0 ends with its first accepted draft
    Round(4.0, [21, 18], [0, 1], [0, 1], [0, 2], **TIMES),
]


def test_each_row_counts_the_rounds_in_which_it_gains_tokens() -> None:
    assert totals(ROUNDS, [0]) == {
        "rounds": 2,
        "seconds": 5.0,
        "draft_s": 2.0,
        "verify_s": 1.0,
        "flush_s": 0.5,
        "sampling_s": 1.5,
        "accepted": 5,
        "refused": 0,
        "tokens": 6,
        "limits": {"1": 1, "4": 1},
    }
    both, other = totals(ROUNDS, [0, 1]), totals(ROUNDS, [1])
    assert both is not None and other is not None
    assert (other["accepted"], other["refused"], other["tokens"], other["limits"]) == (2, 2, 5, {"1": 1, "4": 2})
    assert both["rounds"] == 5 and both["seconds"] == 14.0 and both["limits"] == {"1": 2, "4": 3}


def test_parts_that_were_not_timed_are_not_guessed() -> None:
    computed = totals([*ROUNDS[:3], replace(ROUNDS[3], verify_seconds=None)], [1])
    assert computed is not None and computed["seconds"] == 9.0
    assert [computed[f"{part}_s"] for part in ("draft", "verify", "sampling", "flush")] == [None] * 4


def test_a_single_round_counts_and_none_gives_nothing() -> None:
    computed = totals(ROUNDS[:1], [0])
    assert computed is not None and computed["seconds"] == 9.0 and computed["tokens"] == 5
    assert totals([], [0]) is None and totals(ROUNDS[3:], [0]) is None


def test_measured_apart_is_not_more_than_the_whole() -> None:
    """Device times of the parts may add up to slightly more than the host's time of the round."""
    computed = totals([replace(ROUNDS[1], seconds=1.7)], [0])
    assert computed is not None and computed["sampling_s"] == pytest.approx(0.0)
