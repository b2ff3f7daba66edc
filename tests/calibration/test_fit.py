"""Thresholds and codebooks of a layer against a slow statement of them, and the numbers that tell models apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbench.calibration import file, fit
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
