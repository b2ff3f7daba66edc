"""Tokens drawn from a distribution by a uniform number, on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.decoding.sampling import draw


def test_draws_follow_the_distribution() -> None:
    """Inverse of the sums: exact at the borders, nothing of probability 0, right shares."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, wanted in ((0.0, 1), (0.2499, 1), (0.2501, 3), (0.999999940395, 3)):
        assert int(draw(probs, torch.tensor([uniform]))) == wanted
    many = draw(probs.expand(100_000, -1), torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    assert abs((many == 1).float().mean() - 0.25) < 0.005
    assert set(many.tolist()) == {1, 3}


def test_sums_that_change_where_nothing_can_be_drawn_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's sums are made in parts and may go up or down by a rounding step; NaN is no token past the last."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    rounded = torch.tensor([[0.0, 0.5, 0.50001, 0.99999, 1.0]])
    monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: rounded)
    for uniform, wanted in ((0.3, 1), (0.500005, 3), (0.999999, 3)):
        assert int(draw(probs, torch.tensor([uniform]))) == wanted
    monkeypatch.undo()
    assert int(draw(torch.full((1, 5), float("nan")), torch.tensor([0.5]))) == 0
