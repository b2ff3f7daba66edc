"""Codebooks: the best there are, and never worse than the authors'."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.calibration.fit import fit_keys, fit_values, quantiles
from kvbench.calibration.kmeans import Histogram, distortion, levels
from kvbench.quantizers.nuq import tail

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "kvquant.npz")


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name].astype(np.float32))


def best(values: torch.Tensor, weights: torch.Tensor, count: int) -> float:
    """The least distortion of any cut of sorted values into runs."""
    values, order = values.double().sort()
    weights = weights.double()[order]
    least = float("inf")
    for cuts in combinations(range(1, len(values)), count - 1):
        total = 0.0
        for a, b in zip((0, *cuts), (*cuts, len(values)), strict=True):
            mean = (weights[a:b] * values[a:b]).sum() / weights[a:b].sum()
            total += float((weights[a:b] * (values[a:b] - mean) ** 2).sum())
        least = min(least, total)
    return least / float(weights.sum())


@pytest.mark.parametrize("seed", range(4))
def test_the_codebook_is_the_best_there_is(seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(18, generator=generator).mul(0.4).clamp(-1, 1)
    weights = torch.rand(18, generator=generator) ** 4  # a few weigh most
    histogram = Histogram.empty()
    histogram.add(values, weights)
    assert distortion(histogram, levels(histogram, 4)) == pytest.approx(best(values, weights, 4), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("sparse", ["s0", "s1"])
@pytest.mark.parametrize("side", ["K", "V"])
def test_thresholds_and_codebooks_beside_the_authors(side, sparse):
    """Equal thresholds; errors on the calibration data below those of scikit-learn's codebook from its random start."""
    share = {"s0": 0.0, "s1": 0.01}[sparse]
    x, weights = tensor(f"{side.lower()}_cal"), tensor(f"fisher_{side.lower()}")
    made = (fit_keys if side == "K" else fit_values)(x, weights, [4], share)
    if side == "K":
        assert made.thresholds is not None and made.thresholds.dtype == torch.float16
        for row, end in enumerate(("upper", "lower")):
            assert torch.equal(made.thresholds[row], torch.tensor(GOLDEN[f"K_{end}_b4_{sparse}"]))
    dim = 0 if side == "K" else 1
    upper, lower = (quantiles(x, q, dim).unsqueeze(dim) for q in (tail(share), 1 - tail(share)))
    normalised = (x - (upper + lower) / 2) / ((upper - lower) / 2)
    counted = normalised.abs() <= 1
    histogram = Histogram.empty()
    histogram.add(normalised[counted], weights[counted])
    ours, theirs = made.codebooks[4].levels, tensor(f"{side}_lut_b4_{sparse}")
    assert ours.shape == theirs.shape and ours.abs().max() <= 1
    assert distortion(histogram, ours) < distortion(histogram, theirs)


def test_the_order_of_levels_does_not_count():
    histogram = Histogram.empty()
    histogram.add(torch.tensor([-0.5, -0.5, 0.0, 0.75]))
    error = (2 * 0.25**2 + 0.0 + 0.25**2) / 4  # -0.25, 0 and 0.5 are the nearest
    for order in ([-0.25, 0.0, 0.5], [0.5, 0.0, -0.25], [0.0, 0.5, -0.25]):
        assert distortion(histogram, torch.tensor(order)) == pytest.approx(error, rel=1e-3)


def test_weights_move_levels_to_where_errors_matter():
    values = torch.linspace(-1, 1, 2000)
    plain, weighted = Histogram.empty(), Histogram.empty()
    plain.add(values)
    weighted.add(values, (values > 0.5).float() + 1e-3)
    assert int((levels(plain, 8) > 0.5).sum()) == 2
    assert int((levels(weighted, 8) > 0.5).sum()) >= 5


def test_few_values_no_values_and_no_weights():
    histogram = Histogram.empty()
    assert levels(histogram, 4).tolist() == [0.0] * 4
    histogram.add(torch.tensor([0.25, -0.5, 0.25]))
    assert levels(histogram, 4).tolist() == [-0.5, 0.25, 0.25, 0.25]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    ones, none = fit_keys(x, torch.zeros_like(x), [2], 0.1), fit_keys(x, None, [2], 0.1)
    assert torch.equal(ones.codebooks[2].levels, none.codebooks[2].levels)
    constant = fit_values(torch.full((4, 8), 3.0), None, [2], 0.0)  # every token a range of 0
    assert torch.isfinite(constant.codebooks[2].levels).all()
