"""OSCAR's covariances and rotations: equal to those of the authors' script, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.calibration.rotate import (
    bit_reversal,
    query_covariance,
    spectrum,
    token_weights,
    value_covariance,
)
from kvbench.errors import ConfigError
from kvbench.rotation.named import sylvester

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "new" / "oscar.npz")


def dumps(side: str) -> torch.Tensor:
    """Tokens of the authors' dump; with chunk "all" their script skips the first chunk."""
    return torch.from_numpy(np.concatenate([GOLDEN[f"dump_{side}_chunk{chunk}_L0_D64"] for chunk in (1, 2)]))


def covariances() -> dict[str, torch.Tensor]:
    """Sigma of keys and of values, per KV head."""
    keys = query_covariance(dumps("q"), heads=2)
    weights = token_weights(dumps("k"), keys)
    return {"K": keys, "V": value_covariance(dumps("v"), weights / weights.mean(0))}


@pytest.mark.parametrize("side", ["K", "V"])
def test_covariance_permutation_and_rotation_are_the_authors(side):
    covariance = covariances()[side].mean(0)
    expected = torch.from_numpy(GOLDEN[f"Sigma_{side}_L0_D64"])
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-13 * float(expected.abs().max()))
    result = spectrum(covariance)
    values = torch.from_numpy(GOLDEN[f"eigenvalues_{side}_L0_D64"]).double()
    torch.testing.assert_close(result.eigenvalues, values, rtol=1e-5, atol=1e-6 * float(values.max()))
    assert result.order.tolist() == GOLDEN[f"perm_{side}_L0_D64"].tolist()
    # R mixes the eigenvectors' arbitrary signs: compare U = R P^T H up to the sign of each column
    reference = torch.from_numpy(GOLDEN[f"R_{side}_L0_D64"]).double()
    for rotation in (reference, result.rotation):
        unmixed = torch.empty_like(rotation)
        unmixed[:, result.order] = rotation
        vectors = unmixed @ sylvester(64) / 8
        assert (vectors * result.eigenvectors).sum(0).abs().min() >= 1 - 1e-5
    assert (result.rotation.T @ result.rotation - torch.eye(64)).abs().max() < 1e-12


def test_the_skipped_chunk_would_show():
    queries = torch.cat([torch.from_numpy(GOLDEN["dump_q_chunk0_L0_D64"]), dumps("q")])
    expected = torch.from_numpy(GOLDEN["Sigma_K_L0_D64"])
    assert (query_covariance(queries, 2).mean(0) - expected).abs().max() > 0.1 * expected.abs().max()


def test_rotations_of_each_head_are_those_of_its_covariance_alone():
    both = covariances()["V"]
    together = spectrum(both)
    for head in range(2):
        alone = spectrum(both[head])
        assert torch.equal(together.order[head], alone.order)
        torch.testing.assert_close(together.rotation[head], alone.rotation)
    turned = together.rotation.mT @ together.covariance @ together.rotation
    spread = turned.diagonal(dim1=-2, dim2=-1)
    # a Hadamard matrix gives every channel the same variance
    torch.testing.assert_close(spread, spread.mean(-1, keepdim=True).expand_as(spread))


def test_a_token_weighs_as_much_as_its_scores_with_all_queries():
    torch.manual_seed(0)
    queries, keys = torch.randn(50, 4, 8), torch.randn(50, 2, 8)
    covariance = query_covariance(queries, 2)
    weights = token_weights(keys, covariance)
    scores = torch.stack([(keys[:, h].double() @ queries[:, 2 * h : 2 * h + 2].double().flatten(0, 1).T).square().sum(1)
                          for h in range(2)], 1)  # fmt: skip
    torch.testing.assert_close(weights, scores / 100)  # 50 tokens, 2 query heads per KV head


def test_bit_reversal_and_heads_that_are_no_power_of_two():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    with pytest.raises(ConfigError, match="80 channels, but the bit reversal of OSCAR's rotation requires a power"):
        spectrum(torch.eye(80, dtype=torch.float64))
