"""Figures by position and the share of answers still equal, from rows with known places and known divergences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvbench.metrics.fidelity import position_bins
from kvbench.results.positions import answer_curve, fidelity_stretches, score_changes, survival


def compared(number: int, count: int, other_top: list[int], mode: str = "decode", **more: Any) -> dict[str, Any]:
    """A row whose KL divergence at the position after the k-th token is k + 100 * number, and whose mass is 1 / k."""
    begin = 1 if mode == "decode" else 0
    places = range(begin, count + begin)
    part = {"mode": mode, "other_top": other_top, "kld": [float(k + 100 * number) for k in places]}
    return {"id": f"t/{number}", "fidelity": {**part, "top_mass": [1 / (k or 1) for k in places], **more}}


def answered(*answers: tuple[list[int], float | None]) -> dict[str, dict[str, Any]]:
    return {f"t/{k}": {"id": f"t/{k}", "tokens": own, "scores": {"score": s}} for k, (own, s) in enumerate(answers)}


def test_bins_double_or_have_a_width() -> None:
    assert position_bins(4) == [(0, 1), (1, 2), (2, 4), (4, 8)] and position_bins(0) == [(0, 1)]
    assert position_bins(3) == [(0, 1), (1, 2), (2, 4)]
    assert position_bins(9, 5) == [(0, 5), (5, 10)] and position_bins(10, 5)[-1] == (10, 15)


def test_a_stretch_holds_the_positions_after_its_tokens() -> None:
    rows = [compared(1, 9, [2, 8, 9]), compared(0, 3, [])]
    stretches = fidelity_stretches(rows)
    assert [(s.first, s.last, s.n, s.samples) for s in stretches] == [
        (1, 1, 2, 2), (2, 3, 4, 2), (4, 7, 4, 1), (8, 9, 2, 1)
    ]  # fmt: skip
    means = [s.figures["kld_mean"][0] for s in stretches]
    assert means == [(1 + 101) / 2, (2 + 3 + 102 + 103) / 4, (104 + 107) / 2, 108.5]
    assert [s.figures["other_top"][0] for s in stretches] == [0.0, 0.25, 0.0, 1.0]
    assert stretches[1].figures["top_mass"][0] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert stretches[3].figures["kld_p99"] == (pytest.approx(108.99), None, None)  # one sample has no interval
    assert stretches[0].figures["kld_mean"] == (51.0, 1.0, 101.0)  # whole samples are drawn


def test_stretches_of_equal_width_and_of_a_simulated_pass() -> None:
    assert [(s.first, s.last, s.n) for s in fidelity_stretches([compared(0, 9, [])], 4)] == [
        (1, 3, 3), (4, 7, 4), (8, 9, 2)
    ]  # fmt: skip
    simulated = fidelity_stretches([compared(0, 4, [0], "simulated")])
    assert [(s.first, s.last, s.n) for s in simulated] == [(0, 0, 1), (1, 1, 1), (2, 3, 2)]
    assert [s.figures["other_top"][0] for s in simulated] == [1.0, 0.0, 0.0]
    assert simulated[2].figures["kld_mean"][0] == 2.5
    assert fidelity_stretches([compared(0, 0, [])]) == []


def test_rows_of_older_code_have_no_mass() -> None:
    old = compared(0, 3, [])
    del old["fidelity"]["top_mass"]
    assert "top_mass" in fidelity_stretches([compared(1, 3, [])])[0].figures
    assert "top_mass" not in fidelity_stretches([compared(1, 3, []), old])[0].figures


def test_an_answer_is_equal_up_to_the_token_that_differs() -> None:
    """Answers part at the first token, at the fourth, where one of them ends, and never."""
    base = answered(([7, 1, 1], 1.0), ([1, 2, 3, 4, 5], 1.0), ([5, 6, 7], 0.0), ([8, 9], 1.0))
    other = answered(([6, 1, 1], 0.0), ([1, 2, 3, 9, 5], 1.0), ([5, 6, 7, 8], 1.0), ([8, 9], 0.5))
    curve = answer_curve("kivi", "t", base, other)
    assert curve is not None
    shares = {s.first: s.figures["still_equal"][0] for s in curve.stretches}
    assert shares == {1: 0.75, 2: 0.75, 4: 0.25, 5: 0.25}
    assert [(s.n, s.samples) for s in curve.stretches] == [(3, 4), (2, 4), (0, 4), (0, 4)]
    assert {s.first: s.figures["still_equal"][0] for s in answer_curve("", "t", base, other, 3).stretches} == {  # type: ignore[union-attr]
        3: 0.75, 5: 0.25
    }  # fmt: skip
    value, low, high = curve.stretches[0].figures["still_equal"]
    assert low is not None and high is not None and 0 < low < value < high < 1
    assert curve.changes == {
        "lower": 2, "higher": 1, "mean": pytest.approx(-0.125), "n": 4, "p": 1.0,
        "stderr": pytest.approx(np.std([-1, 0, 1, -0.5], ddof=1) / 2),
    }  # fmt: skip


def test_where_only_the_ends_differ_the_answers_part_after_the_last_common_token() -> None:
    parts = [{"at": 2, "compared": 2}]
    assert [(s.first, s.figures["still_equal"][0]) for s in survival(parts)] == [(1, 1.0), (2, 1.0), (3, 0.0)]
    assert survival([]) == []


def test_changes_of_scores_have_a_sign() -> None:
    base = answered(*[([1], 1.0)] * 8, ([1], None))
    other = answered(*[([1], 0.0)] * 7, ([1], 1.0), ([1], 1.0))
    lost, won = score_changes(base, other, list(base)), score_changes(other, base, list(base))
    assert lost is not None and won is not None
    assert (lost["lower"], lost["higher"], lost["mean"], lost["n"]) == (7, 0, -7 / 8, 8)
    assert (won["lower"], won["higher"], won["mean"]) == (0, 7, 7 / 8)
    assert lost["p"] == won["p"] == pytest.approx(2 / 2**7)
    assert score_changes(base, other, ["t/8"]) is None and answer_curve("", "t", base, {}) is None
