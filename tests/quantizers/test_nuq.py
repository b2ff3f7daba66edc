"""KVQuant's quantizer against its authors' dequantized values, and at its edges."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers import nuq

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "kvquant.npz")
SHARES = {"s1": 0.01, "s0": 0.0}


def tensor(name: str) -> torch.Tensor:
    array = GOLDEN[name]
    return torch.tensor(array if array.dtype == np.float32 else array.astype(np.float32))


def mask_of(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.tensor(np.unpackbits(GOLDEN[name])[: shape.numel()].reshape(shape).astype(bool))


@pytest.mark.parametrize("sparse", SHARES)
def test_keys_equal_the_authors_given_their_thresholds_and_codebook(sparse):
    x, levels = tensor("k_test"), tensor(f"K_lut_b4_{sparse}")
    thresholds = torch.tensor(np.stack([GOLDEN[f"K_{end}_b4_{sparse}"] for end in ("upper", "lower")]))
    assert thresholds.dtype == torch.float16
    outliers = nuq.key_outliers(x, thresholds) if SHARES[sparse] else None
    scale, offset = nuq.key_params(thresholds)
    values = nuq.decode(nuq.encode(x, scale, offset, levels, outliers), scale, offset, levels)
    if outliers is not None:
        assert torch.equal(outliers, mask_of("K_outlier_b4_s1", x.shape))
        values = torch.where(outliers, x, values)
    assert torch.equal(values, tensor(f"K_deq_b4_{sparse}"))


@pytest.mark.parametrize("sparse", SHARES)
def test_values_equal_the_authors_given_their_codebook(sparse):
    x, levels, share = tensor("v_test"), tensor(f"V_lut_b4_{sparse}"), SHARES[sparse]
    outliers = nuq.value_outliers(x, share) if share else None
    scale, offset = (p.unsqueeze(-1) for p in nuq.value_params(x, outliers, torch.float32))
    values = nuq.decode(nuq.encode(x, scale, offset, levels, outliers), scale, offset, levels)
    if outliers is not None:
        assert torch.equal(outliers, mask_of("V_outlier_b4_s1", x.shape))
        values = torch.where(outliers, x, values)
    assert torch.equal(values, tensor(f"V_deq_b4_{sparse}"))


def test_ties_go_to_the_first_level_in_the_codebook():
    x, one, zero = torch.tensor([[0.0, 0.25]]), torch.ones(1, 1), torch.zeros(1, 1)
    assert nuq.encode(x, one, zero, torch.tensor([0.5, -0.5, 1.0, -1.0]), None).tolist() == [[0, 0]]
    assert nuq.encode(x, one, zero, torch.tensor([-0.5, 0.5, 1.0, -1.0]), None).tolist() == [[0, 1]]


def test_a_range_of_zero_gives_the_offset():
    levels = torch.tensor([-1.0, -0.3, 0.4, 1.0])
    thresholds = torch.tensor([[2.0, 3.0], [2.0, 1.0]]).half()
    scale, offset = nuq.key_params(thresholds)
    assert scale.tolist() == [0.0, 1.0]
    assert nuq.decode(torch.tensor([[3, 3]]), scale, offset, levels).tolist() == [[2.0, 3.0]]
    constant = torch.full((2, 32), 0.7)
    outliers = nuq.value_outliers(constant, 0.01)
    assert outliers.all()  # every element is its token's threshold: all stay exact
    scale, offset = nuq.value_params(constant, None, torch.float32)
    values = nuq.decode(
        nuq.encode(constant, scale[:, None], offset[:, None], levels, None), scale[:, None], offset[:, None], levels
    )
    assert torch.equal(values, constant)


def test_outliers_leave_no_trace_in_the_range_of_their_token():
    """An outlier counts as the median, which lies among the others however far the outlier is."""
    x = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 100.0], [-900.0, 3.0, 4.0, 6.0, 5.0], [1.0, 2.0, 9.0, 2.0, 8.0]])
    outliers = torch.tensor([[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    scale, offset = nuq.value_params(x, outliers, torch.float32)
    assert scale.tolist() == [1.5, 1.5, 0.0]
    assert offset.tolist() == [0.5, 4.5, 2.0]


def test_capped_outliers_are_the_farthest_of_each_side():
    thresholds = torch.stack([torch.ones(8), -torch.ones(8)]).half()
    x = torch.tensor([[1.5, 3.0, 2.0, -1.2, -9.0, 0.3, 0.9, 1.1]])
    assert nuq.key_outliers(x, thresholds).sum() == 6
    assert nuq.key_outliers(x, thresholds, most=2).nonzero()[:, 1].tolist() == [1, 2, 3, 4]
    assert nuq.key_outliers(x, thresholds, most=1).nonzero()[:, 1].tolist() == [1, 4]


def test_values_beyond_what_fp16_holds_stay_finite():
    x = torch.tensor([[1e6, -1e6, 3.0, 4.0]])
    scale, offset = nuq.value_params(x, None, torch.float16)
    assert torch.isfinite(scale).all() and torch.isfinite(offset).all() and scale.dtype == torch.float16


def test_nan_is_refused():
    with pytest.raises(NonFiniteError, match=r"index \(0, 1\)"):
        nuq.check_finite(torch.tensor([[0.0, float("nan")]]))
