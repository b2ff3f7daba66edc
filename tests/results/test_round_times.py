"""The time per token that acceptance and the times of a round's parts predict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvbench.results.speculation import expected_tokens, round_times, summed


def totals(**changes: Any) -> dict[str, Any]:
    """Return the sums of ten rounds with four drafts; acceptance .9, 3 tokens a round."""
    parts = {"draft_s": 10.0, "verify_s": 5.0, "flush_s": 0.1, "sampling_s": 0.2}
    counts = {"accepted": 27, "refused": 3, "tokens": 37, "limits": {"4": 10}}
    return {"rounds": 10, "seconds": 15.3, **parts, **counts, **changes}


def test_expected_tokens_are_those_of_the_geometric_model() -> None:
    assert expected_tokens(0.9, 4) == pytest.approx((1 - 0.9**5) / (1 - 0.9))
    assert expected_tokens(1.0, 3) == 4.0 and expected_tokens(0.0, 3) == 1.0 and expected_tokens(0.5, 0) == 1.0


def test_acceptance_counts_decided_drafts_alone() -> None:
    """Draws of a known probability: drafts after a refusal are not decided."""
    chance, accepted, refused, tokens = random.Random(1), 0, 0, 0
    for _ in range(5000):
        run = next((i for i in range(4) if chance.random() >= 0.8), 4)
        accepted, refused, tokens = accepted + run, refused + (run < 4), tokens + run + 1
    times = round_times(totals(rounds=5000, accepted=accepted, refused=refused, tokens=tokens, limits={"4": 5000}))
    assert times is not None
    assert times["acceptance"] == pytest.approx(0.8, abs=0.01)
    assert times["expected_tokens"] == pytest.approx(times["tokens"], rel=0.01)
    assert accepted / (4 * 5000) == pytest.approx(0.59, abs=0.02)  # the paper's rate


def test_expected_and_measured_time_per_token() -> None:
    times = round_times(totals())
    assert times is not None
    assert times["acceptance"] == 0.9 and times["tokens"] == 3.7
    assert times["expected_tpot_s"] == pytest.approx(1.5 / expected_tokens(0.9, 4))
    assert times["tpot_s"] == pytest.approx(15.3 / 37)
    assert times["why"] == (
        "+13% per token: sampling and Python take 1% of draft and verification, flushes 1%; "
        "3.70 tokens a round, 4.10 expected"
    )


def test_no_reason_within_five_percent() -> None:
    times = round_times(totals(tokens=41))
    assert times is not None and times["why"] is None


def test_gammas_that_change_are_averaged() -> None:
    times = round_times(totals(limits={"2": 5, "8": 5}))
    assert times is not None
    assert times["expected_tokens"] == pytest.approx((expected_tokens(0.9, 2) + expected_tokens(0.9, 8)) / 2)


def test_sums_over_answers() -> None:
    double = summed([totals(), None, totals(limits={"4": 9, "2": 1})])
    assert double is not None and double["limits"] == {"4": 19, "2": 1} and double["draft_s"] == 20.0
    assert round_times(double)["tokens"] == 3.7  # type: ignore[index]
    untimed = summed([totals(), totals(draft_s=None)])
    assert untimed is not None and untimed["draft_s"] is None and untimed["rounds"] == 20
    assert round_times(untimed) is None and round_times(None) is None and summed([None]) is None
    assert round_times(totals(accepted=0, refused=0)) is None  # no draft was decided


def test_a_reason_is_given_from_five_percent_on() -> None:
    base = totals(draft_s=20.0, verify_s=17.0, accepted=0, refused=1, limits={"0": 10}, tokens=10)
    for seconds, said in ((37.0 * 1.049, False), (37.0 * 1.051, True), (37.0 * 0.951, False), (37.0 * 0.949, True)):
        times = round_times({**base, "seconds": seconds})
        assert times is not None and (times["why"] is not None) == said
    parts = round_times(base)
    assert parts is not None
    names = ("draft_s", "verify_s", "sampling_s", "flush_s", "acceptance", "tokens", "expected_tokens")
    assert [parts[name] for name in names] == pytest.approx([2.0, 1.7, 0.02, 0.01, 0.0, 1.0, 1.0])
