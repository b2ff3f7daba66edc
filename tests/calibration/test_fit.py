"""Thresholds and codebooks of a layer against a slow statement of them, and the numbers that tell models apart.

Codebooks: the best there are, and never worse than the authors'.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.calibration import file, fit
from kvbench.calibration.fit import Histogram, distortion, fit_keys, fit_values, levels, quantiles
from kvbench.quantizers.nuq import tail
from tests import zoo


def data(rows: int = 200, channels: int = 6) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, channels, generator=draw) * torch.arange(1, channels + 1) + torch.arange(channels)


def test_thresholds_are_the_percentiles_of_each_channel() -> None:
    """KVQuant: a share of 10 % leaves 5 % on each side; 0: the extremes."""
    x = data()
    for share, high, low in ((0.1, 95, 5), (0.02, 99, 1), (0.0, 100, 0)):
        found = fit.fit_keys(x, None, [2], share).thresholds
        expected = np.percentile(x.numpy(), [high, low], axis=0).astype(np.float16)
        assert found.dtype == torch.float16 and found.shape == (2, 6)
        np.testing.assert_allclose(found.float(), expected.astype(np.float32), rtol=1e-3)
    assert fit.fit_values(x, None, [2], 0.1).thresholds is None


def test_percentiles_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data()
    for dim in (0, 1):
        whole = fit.quantiles(x, 0.95, dim)
        np.testing.assert_allclose(whole, np.percentile(x.numpy(), 95, axis=dim), rtol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(fit, "ELEMENTS", 3 * (200 if dim == 0 else 6))
            assert torch.equal(fit.quantiles(x, 0.95, dim), whole)
    with monkeypatch.context() as patch:
        weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) ** 4
        weighted = fit.fit_keys(x, weights, [2], 0.1).codebooks[2].levels
        books = fit.fit_keys(x, None, [2, 3], 0.1).codebooks
        patch.setattr(fit, "ELEMENTS", 7 * 6)
        assert torch.equal(fit.fit_keys(x, weights, [2], 0.1).codebooks[2].levels, weighted)
        for width, book in fit.fit_keys(x, None, [2, 3], 0.1).codebooks.items():
            assert len(book.levels) == 1 << width
            assert torch.equal(book.levels, books[width].levels)
            assert book.norm == pytest.approx(books[width].norm)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_levels_are_of_values_within_the_thresholds_and_of_tokens_that_count(side: str) -> None:
    """Values at two levels, some far outliers, and tokens of other levels that are skipped."""
    rows = torch.tensor([-1.0, 1.0] * 50).repeat(40, 1)
    rows[:, ::2] = -1.0
    rows[:, 1::2] = 1.0
    x = rows if side == "values" else rows.t().contiguous()
    skip = torch.zeros(len(x), dtype=torch.bool)
    skip[:5] = True
    noisy = x.clone()
    noisy[:5] *= 0.25
    function = fit.fit_values if side == "values" else fit.fit_keys
    clean = function(x, None, [1], 0.0).codebooks[1]
    computed = function(noisy, None, [1], 0.0, skip).codebooks[1]
    np.testing.assert_allclose(clean.levels, [-1.0, 1.0], atol=2e-3)
    np.testing.assert_allclose(computed.levels, clean.levels, atol=2e-3)
    assert clean.norm == pytest.approx((1.0, 0.0), abs=2e-3)
    counted = function(noisy, None, [1], 0.0).codebooks[1]
    if side == "keys":  # each channel is divided by its own extremes, a token's by its own
        assert abs(float(counted.levels[0])) < 0.99


def test_weights_move_the_levels_and_weights_of_nothing_are_none() -> None:
    """One level for -1 (weight 3) and 1 (weight 1): the weighted mean."""
    x = torch.tensor([[-1.0], [1.0]] * 30)
    weights = torch.where(x < 0, 3.0, 1.0)
    alone = fit.fit_keys(x, None, [0], 0.0).codebooks[0].levels
    assert float(alone) == pytest.approx(0.0, abs=2e-3)
    weighted = fit.fit_keys(x, weights, [0], 0.0).codebooks[0]
    assert float(weighted.levels) == pytest.approx(-0.5, abs=2e-3)
    assert weighted.norm == pytest.approx((1.0, 0.5), abs=2e-3), "Q-Norm restores the mean without weights, 0"
    assert torch.equal(fit.fit_keys(x, 0 * weights, [0], 0.0).codebooks[0].levels, alone)


def test_a_model_is_known_by_weights_from_its_first_to_its_last() -> None:
    model = zoo.model("llama")
    computed = file.probe(model)
    embedding = model.get_input_embeddings().weight.detach().reshape(-1)
    places = np.linspace(0, len(embedding) - 1, 256).astype(int)
    assert torch.equal(computed["probe.embedding"], embedding[places].float())
    expected = []
    for layer in model.model.layers:
        flat = layer.self_attn.k_proj.weight.detach().reshape(-1)
        expected.append(flat[np.linspace(0, len(flat) - 1, 16).astype(int)].float())
    assert torch.equal(computed["probe.keys"], torch.cat(expected))


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
