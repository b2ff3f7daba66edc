"""KL divergence and its tails, changes of probability, flips: against reference values, and by construction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.decoding.head import compare_logits
from kvbench.metrics import fidelity

FOLDER = Path(__file__).parents[1] / "golden"
ARRAYS = np.load(FOLDER / "fidelity.npz")
VALUES: dict[str, Any] = json.loads((FOLDER / "fidelity.json").read_text(encoding="utf-8"))


def test_divergence_of_every_position_equals_the_reference() -> None:
    measured = fidelity.compare(ARRAYS["base_logits_A"], ARRAYS["test_logits_A"], ARRAYS["target_A"])
    tolerance = 1e-9 * np.maximum(np.abs(ARRAYS["kld_A"]), 1e-6)
    assert (np.abs(measured.kld - ARRAYS["kld_A"]) <= tolerance).all()
    assert np.abs(measured.change - ARRAYS["dp_A"]).max() < 1e-12
    assert (measured.same_top == ARRAYS["same_top_A"]).all()


def test_statistics_equal_the_reference() -> None:
    exact = VALUES["A"]["exact"]
    figures = fidelity.statistics(
        fidelity.compare(ARRAYS["base_logits_A"], ARRAYS["test_logits_A"], ARRAYS["target_A"])
    )
    names = ("kld_mean", "kld_median", "kld_max", "kld_min", "kld_p90", "kld_p95", "kld_p99", "kld_p99.9", "same_top")
    for name in names:
        assert figures[name] == pytest.approx(exact[name], rel=1e-9, abs=1e-15), name
    assert figures["change_mean"] == pytest.approx(exact["dp_mean"], rel=1e-9)
    assert figures["change_rms"] == pytest.approx(exact["dp_rms"], rel=1e-9)
    assert figures["nll_base"] == pytest.approx(exact["mean_nll_base"], rel=1e-12)
    assert figures["nll"] == pytest.approx(exact["mean_nll"], rel=1e-12)
    assert figures["n"] == VALUES["A"]["n"]


def test_llamacpps_rounding_is_imitated() -> None:
    theirs = VALUES["A"]["llamacpp"]
    measured = fidelity.compare_as_llamacpp(ARRAYS["base_logits_A"], ARRAYS["test_logits_A"], ARRAYS["target_A"])
    assert np.abs(measured.kld - ARRAYS["llamacpp_kld_A"]).max() < 5e-6
    assert np.abs(measured.change - ARRAYS["llamacpp_dp_A"]).max() < 5e-6
    figures = fidelity.statistics(measured)
    for name in ("kld_mean", "kld_p99.9", "kld_p99", "kld_p95", "kld_p90", "kld_median", "kld_max", "kld_min"):
        assert figures[name] == pytest.approx(theirs[name], abs=5e-6), name
    assert figures["kld_min"] < 0
    assert figures["kld_stderr"] == pytest.approx(theirs["kld_mean_unc"], rel=1e-3)
    assert figures["change_stderr"] == pytest.approx(theirs["dp_mean_unc"], rel=1e-3)
    assert figures["same_top_stderr"] == pytest.approx(theirs["same_top_unc"], rel=1e-6)
    assert figures["nll_base"] == pytest.approx(theirs["mean_nll_base"], rel=1e-5)  # too small: the floor of 16 nats


@pytest.mark.parametrize("case", ["0", "3"])
def test_flips_equal_the_reference(case: str) -> None:
    expected = VALUES["flips"][case]
    counted = fidelity.flips(ARRAYS[f"correct_base_{case}"], ARRAYS[f"correct_test_{case}"])
    assert (counted["lost"], counted["won"]) == (expected["correct_to_incorrect"], expected["incorrect_to_correct"])
    assert 100 * counted["flips"] == pytest.approx(expected["flips_percent"])
    assert counted["change"] == pytest.approx(expected["accuracy_test"] - expected["accuracy_base"])
    assert counted["p"] == pytest.approx(expected["mcnemar_exact_p"], rel=1e-12)
    assert counted["change_stderr"] == pytest.approx(expected["stderr_of_difference"], rel=1e-12)
    assert counted["n"] == expected["n"]


def test_flips_need_the_same_samples() -> None:
    with pytest.raises(ValueError, match="3 samples of the base are compared with 2"):
        fidelity.flips([1, 0, 1], [1, 0])
    assert fidelity.mcnemar(0, 0) == 1.0 and fidelity.mcnemar(1, 9) == fidelity.mcnemar(9, 1) == pytest.approx(
        22 / 1024
    )


def test_equal_logits_and_permuted_vocabularies() -> None:
    draw = np.random.default_rng(0)
    base, other, true = draw.normal(size=(7, 50)), draw.normal(size=(7, 50)), draw.integers(0, 50, 7)
    itself = fidelity.compare(base, base + 3.0, true)  # a constant added to all logits changes nothing
    assert np.abs(itself.kld).max() < 1e-14 and itself.same_top.all() and np.abs(itself.change).max() < 1e-15
    one = fidelity.compare(base, other, true)
    order = draw.permutation(50)
    where = np.argsort(order)
    two = fidelity.compare(base[:, order], other[:, order], where[true])
    assert np.allclose(one.kld, two.kld, rtol=1e-12) and np.allclose(one.change, two.change, rtol=1e-12)
    assert (one.kld > 0.1).all()
    assert not np.allclose(one.kld, fidelity.compare(other, base, true).kld, rtol=0.01)  # the base comes first


def test_a_token_of_zero_probability_adds_nothing() -> None:
    base = np.array([[0.0, 1.0, -np.inf]])
    assert fidelity.compare(base, np.array([[1.0, 0.0, 5.0]]), [0]).kld[0] > 0
    assert math.isfinite(fidelity.compare(base, np.array([[1.0, 0.0, 5.0]]), [0]).kld[0])


def test_prompts_are_drawn_whole() -> None:
    groups = [np.full(10, float(i)) for i in range(12)]
    low, high = fidelity.bootstrap(groups, draws=2000)
    loose = math.sqrt(143 / 12) / math.sqrt(12) * 1.96  # by prompts: sd of 0..11 over the root of 12
    assert (high - low) / 2 == pytest.approx(loose, rel=0.1)
    assert low < 5.5 < high
    assert fidelity.bootstrap([np.zeros(5), np.zeros(3)], draws=100) == (0.0, 0.0)
    assert fidelity.bootstrap(groups, 100.0, draws=500)[1] == 11.0
    assert fidelity.bootstrap(groups, draws=500) == fidelity.bootstrap(groups, draws=500)
    uneven = fidelity.bootstrap([np.zeros(1), np.ones(99)], draws=4000)
    assert uneven == (0.0, 1.0)  # a mean over positions, not over prompts


def test_errors_by_the_number_of_decoded_tokens() -> None:
    n = 20
    zero = np.zeros(n)
    positions = fidelity.Positions(np.arange(n, dtype=float), zero, np.arange(n) % 2 == 0, zero, zero)
    bins = fidelity.by_position(positions, np.arange(n))
    assert [(b["first"], b["last"], b["n"]) for b in bins] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 4), (8, 15, 8), (16, 31, 4),
    ]  # fmt: skip
    assert bins[3]["kld_mean"] == 5.5 and bins[3]["kld_max"] == 7.0 and bins[3]["same_top"] == 0.5


def test_answers_part_at_their_first_difference_or_where_one_ends() -> None:
    assert fidelity.first_difference([1, 2, 3], [1, 5, 3]) == fidelity.Divergence(1, 3)
    assert fidelity.first_difference([1, 2, 3], [1, 2, 3]) == fidelity.Divergence(None, 3)
    assert fidelity.first_difference([1, 2, 3], [1, 2]) == fidelity.Divergence(2, 2)


def test_the_mass_of_the_20_most_probable_tokens_is_kept_where_the_candidate_gives_as_much() -> None:
    """25 tokens: the base's last five do not count, nor what the candidate gives beyond the base's share."""
    p = np.log(np.array([[*[0.04] * 20, *[0.04 - 1e-6] * 5]]) / (1 - 5e-6))
    q = np.log(np.array([[0.02, 0.06, *[0.04] * 18, *[0.03] * 5]]))
    assert fidelity.top_mass(p, q) == pytest.approx((0.02 + 19 * 0.04) / 0.8, rel=1e-4)
    assert fidelity.top_mass(q, p) != pytest.approx(fidelity.top_mass(p, q), rel=1e-4)  # the base chooses the tokens
    assert fidelity.top_mass(p, p) == 1.0 and fidelity.top_mass(p[:, :3], q[:, :3]) < 1


def test_the_mass_on_the_devices_logits_is_that_of_the_reference() -> None:
    base, other, target = (ARRAYS[name][:40] for name in ("base_logits_A", "test_logits_A", "target_A"))
    measured = compare_logits(*map(torch.from_numpy, (base, other, target))).positions.top_mass
    exact = fidelity.compare(base, other, target).top_mass
    assert measured is not None and np.abs(measured - exact).max() < 1e-12 and 0.5 < exact.min() < exact.max() <= 1
