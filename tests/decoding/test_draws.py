"""Tokens drawn from a distribution by a uniform number, on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.decoding.sampling import Sampling, pick_tokens, probabilities


def test_draws_follow_the_distribution() -> None:
    """Inverse of the sums: exact at the borders, nothing of probability 0, right shares."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, wanted in ((0.0, 1), (0.2499, 1), (0.2501, 3), (0.999999940395, 3)):
        assert int(pick_tokens(probs, torch.tensor([uniform]))) == wanted
    many = pick_tokens(probs.expand(100_000, -1), torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    assert abs((many == 1).float().mean() - 0.25) < 0.005
    assert set(many.tolist()) == {1, 3}


def test_sums_that_change_where_nothing_can_be_drawn_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU adds in parts, so sums may go up or down by a rounding step; NaN must not draw a token past the last."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    rounded = torch.tensor([[0.0, 0.5, 0.50001, 0.99999, 1.0]])
    monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: rounded)
    for uniform, wanted in ((0.3, 1), (0.500005, 3), (0.999999, 3)):
        assert int(pick_tokens(probs, torch.tensor([uniform]))) == wanted
    monkeypatch.undo()
    assert int(pick_tokens(torch.full((1, 5), float("nan")), torch.tensor([0.5]))) == 0


def test_each_row_has_a_seed_of_its_own() -> None:
    drawn = [float(torch.rand(1, generator=each)) for each in Sampling(0.5, seed=7).generators(3)]
    assert drawn == [float(torch.rand(1, generator=torch.Generator().manual_seed(seed))) for seed in (7, 8, 9)]
    listed = [float(torch.rand(1, generator=each)) for each in Sampling(0.5, seed=[9, 7, 7]).generators(3)]
    assert listed == [drawn[2], drawn[0], drawn[0]]
    with pytest.raises(ValueError, match="2 seeds were given for a batch of 3"):
        Sampling(0.5, seed=[1, 2]).generators(3)


@pytest.mark.parametrize(("top_p", "kept"), [(0.499, 1), (0.5, 1), (0.501, 2), (0.75, 2), (0.751, 3), (0.9, 4)])
def test_the_nucleus_ends_with_the_token_that_reaches_its_mass(top_p: float, kept: int) -> None:
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    computed = probabilities(probs.log(), Sampling(1.0, top_p))
    assert int((computed > 0).sum()) == kept and float(computed.sum()) == pytest.approx(1.0)
    assert computed[0, 1] == computed.max()


def test_tokens_as_probable_as_the_last_of_top_k_stay() -> None:
    computed = probabilities(torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log(), Sampling(2.0, top_k=3))
    assert torch.equal(computed > 0, torch.tensor([[True, True, True, True]]))
    computed = probabilities(torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log(), Sampling(2.0, top_k=2))
    assert torch.equal(computed > 0, torch.tensor([[False, True, True, False]]))
    assert float(computed[0, 1] / computed[0, 2]) == pytest.approx(
        2**0.5
    )  # a temperature of 2 takes the root of the odds


def test_any_whole_number_is_a_seed() -> None:
    for seed, same in ((2**64 + 5, 5), (-1, 2**63 - 1)):
        (drawn,) = Sampling(0.5, seed=seed).generators(1)
        wanted = torch.rand(3, generator=torch.Generator().manual_seed(same))
        assert torch.equal(torch.rand(3, generator=drawn), wanted)


def test_greedy_probabilities_are_those_of_the_best_token() -> None:
    computed = probabilities(torch.tensor([[0.5, 2.0, 1.0], [3.0, 2.0, 1.0]]), Sampling())
    assert computed.dtype == torch.float32 and computed.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
