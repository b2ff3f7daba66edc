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
    values = nuq.decode_nuq(nuq.encode_nuq(x, scale, offset, levels, outliers), scale, offset, levels)
    if outliers is not None:
        assert torch.equal(outliers, mask_of("K_outlier_b4_s1", x.shape))
        values = torch.where(outliers, x, values)
    assert torch.equal(values, tensor(f"K_deq_b4_{sparse}"))


@pytest.mark.parametrize("sparse", SHARES)
def test_values_equal_the_authors_given_their_codebook(sparse):
    x, levels, share = tensor("v_test"), tensor(f"V_lut_b4_{sparse}"), SHARES[sparse]
    outliers = nuq.value_outliers(x, share) if share else None
    scale, offset = (p.unsqueeze(-1) for p in nuq.value_params(x, outliers, torch.float32))
    values = nuq.decode_nuq(nuq.encode_nuq(x, scale, offset, levels, outliers), scale, offset, levels)
    if outliers is not None:
        assert torch.equal(outliers, mask_of("V_outlier_b4_s1", x.shape))
        values = torch.where(outliers, x, values)
    assert torch.equal(values, tensor(f"V_deq_b4_{sparse}"))


def test_ties_go_to_the_first_level_in_the_codebook():
    x, one, zero = torch.tensor([[0.0, 0.25]]), torch.ones(1, 1), torch.zeros(1, 1)
    assert nuq.encode_nuq(x, one, zero, torch.tensor([0.5, -0.5, 1.0, -1.0]), None).tolist() == [[0, 0]]
    assert nuq.encode_nuq(x, one, zero, torch.tensor([-0.5, 0.5, 1.0, -1.0]), None).tolist() == [[0, 1]]


def test_a_range_of_zero_gives_the_offset():
    levels = torch.tensor([-1.0, -0.3, 0.4, 1.0])
    thresholds = torch.tensor([[2.0, 3.0], [2.0, 1.0]]).half()
    scale, offset = nuq.key_params(thresholds)
    assert scale.tolist() == [0.0, 1.0]
    assert nuq.decode_nuq(torch.tensor([[3, 3]]), scale, offset, levels).tolist() == [[2.0, 3.0]]
    constant = torch.full((2, 32), 0.7)
    outliers = nuq.value_outliers(constant, 0.01)
    assert outliers.all()  # every element is its token's threshold: all stay exact
    scale, offset = nuq.value_params(constant, None, torch.float32)
    values = nuq.decode_nuq(
        nuq.encode_nuq(constant, scale[:, None], offset[:, None], levels, None), scale[:, None], offset[:, None], levels
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
    assert nuq.key_outliers(x, thresholds, most=20).sum() == 6  # more than there are channels
    inside = torch.tensor([[1.0, -1.0, 0.5, 0.0, 0.9, -0.9, 0.1, 1.0]])
    assert not nuq.key_outliers(inside, thresholds, most=2).any() and not nuq.key_outliers(inside, thresholds).any()


def test_the_distance_of_an_outlier_is_measured_in_ranges_of_its_channel():
    """A channel with a wide range needs a larger value to be as far out; ranges need not lie around 0."""
    thresholds = torch.tensor([[1.0, 10.0, 30.0, 1.0], [-1.0, -10.0, 10.0, -1.0]]).half()
    x = torch.tensor([[3.0, 20.0, 45.0, 0.0], [-2.0, -30.0, 5.0, 0.0]])
    assert nuq.key_outliers(x, thresholds, most=1).nonzero().tolist() == [[0, 0], [1, 1]]


def test_keys_of_several_rows_have_thresholds_of_their_own():
    thresholds = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]], [[5.0, 0.5], [-5.0, 0.0]]]).half()
    x = torch.tensor([[[2.0, 0.7], [0.0, -3.0]], [[2.0, 0.7], [-6.0, -0.1]]])
    assert nuq.key_outliers(x, thresholds).tolist() == [[[True, False], [False, True]], [[False, True], [True, True]]]
    scale, offset = nuq.key_params(thresholds)
    assert scale.tolist() == [[1.0, 1.0], [5.0, 0.25]] and offset.tolist() == [[0.0, 0.0], [0.0, 0.25]]
    scale, offset = nuq.key_params(torch.tensor([[1.0], [0.00048828125]]).half())  # 0.500244140625 needs 12 bits
    assert scale.item() == 0.499755859375 and offset.item() == 0.5 and scale.dtype == torch.float32


def test_outliers_of_values_are_half_at_either_end_in_any_number_of_tokens(monkeypatch):
    assert nuq.tail(0.1) == 0.95
    x = torch.arange(41.0).repeat(2, 7, 1) * torch.tensor([1.0, -2.0])[:, None, None]
    mask = nuq.value_outliers(x, 0.1)
    ends = [0, 1, 2, 38, 39, 40]
    assert mask.nonzero()[:, 2].view(14, -1).tolist() == [ends] * 14
    monkeypatch.setattr(nuq, "ELEMENTS", 100)  # two tokens at a time
    x = torch.randn(2, 7, 41, generator=torch.Generator().manual_seed(0))
    parts = nuq.value_outliers(x, 0.1)
    monkeypatch.setattr(nuq, "ELEMENTS", 1)
    assert torch.equal(parts, nuq.value_outliers(x, 0.1)) and parts.shape == x.shape
    assert parts.sum(-1).tolist() == [[6] * 7] * 2
    empty = nuq.value_outliers(x[:, :0], 0.1)
    assert empty.shape == (2, 0, 41) and empty.dtype == torch.bool


def test_an_outlier_has_the_code_of_the_offset():
    x, outliers = torch.tensor([[5.0, 7.0, -9.0]]), torch.tensor([[False, True, True]])
    levels = torch.tensor([-1.0, 0.1, 1.0, 0.5])
    assert nuq.encode_nuq(x, torch.tensor(2.0), torch.tensor(6.0), levels, outliers).tolist() == [[0, 1, 1]]
    codes = nuq.encode_nuq(x, torch.tensor(2.0), torch.tensor(6.0), levels, None)
    assert codes.tolist() == [[0, 3, 0]] and codes.dtype == torch.uint8
    assert nuq.decode_nuq(codes, torch.tensor(2.0), torch.tensor(6.0), levels).tolist() == [[4.0, 7.0, 4.0]]


def test_values_beyond_what_fp16_holds_stay_finite():
    x = torch.tensor([[1e6, -1e6, 3.0, 4.0]])
    scale, offset = nuq.value_params(x, None, torch.float16)
    assert (scale.item(), offset.item()) == (65504.0, 0.0) and scale.dtype == offset.dtype == torch.float16
    for sign in (1.0, -1.0):
        scale, offset = nuq.value_params(sign * torch.tensor([[264000.0, 200000.0]]), None, torch.float16)
        assert (scale.item(), offset.item()) == (32000.0, sign * 65504.0)
    assert {part.dtype for part in nuq.value_params(x, None, torch.float32)} == {torch.float32}


def test_nan_is_refused():
    with pytest.raises(NonFiniteError, match=r"index \(0, 1\)"):
        nuq.check_finite(torch.tensor([[0.0, float("nan")]]))
    with pytest.raises(NonFiniteError, match=r"index \(1, 0\)"):
        nuq.check_finite(torch.tensor([[0.0, 1.0], [-float("inf"), float("nan")]]))
    nuq.check_finite(torch.zeros(2, 2))
