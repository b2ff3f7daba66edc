"""The output head in fp32: scaling, bias and softcap, heads that are none, and predictions compared in parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.decoding import head as heads
from kvbench.decoding.head import Head, compare_logits, digests
from kvbench.errors import ModelError

STATES = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
OTHERS = STATES + 0.1 * torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
TARGET = torch.arange(6)


class Model(torch.nn.Module):
    """A model of which only the head and the numbers of its configuration matter."""

    def __init__(self, head: Any, **numbers: Any) -> None:
        super().__init__()
        self.head, self.embed = head, torch.nn.Embedding(3, 8)
        self.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(**numbers))

    def get_output_embeddings(self) -> Any:
        return self.head

    def get_input_embeddings(self) -> Any:
        return self.embed


def linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(2)
    return torch.nn.Linear(8, 20, bias=bias).to(dtype)


@pytest.mark.parametrize(
    ("numbers", "factor", "cap"),
    [
        ({}, 1.0, None),
        ({"logit_scale": 0.25}, 0.25, None),
        ({"logits_scaling": 4.0}, 0.25, None),
        ({"logit_scale": 0.5, "logits_scaling": 4.0}, 0.5, None),
        ({"final_logit_softcapping": 0.5}, 1.0, 0.5),
        ({"logits_scaling": 2.0, "final_logit_softcapping": 3.0}, 0.5, 3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_scaled_and_capped_as_the_model_says(numbers, factor, cap, bias) -> None:
    module = linear(bias)
    wanted = STATES @ module.weight.T + (module.bias if bias else 0.0)
    wanted = wanted * factor
    wanted = wanted if cap is None else cap * torch.tanh(wanted / cap)
    torch.testing.assert_close(Head(Model(module, **numbers)).logits(STATES), wanted)  # type: ignore[arg-type]


def test_a_head_of_16_bits_is_applied_in_fp32() -> None:
    module = linear(True, torch.bfloat16)
    head = Head(Model(module))  # type: ignore[arg-type]
    logits = head.logits(STATES.bfloat16())
    assert logits.dtype == torch.float32 and head.dtype == torch.bfloat16
    exact = STATES.bfloat16().float() @ module.weight.float().T + module.bias.float()
    torch.testing.assert_close(logits, exact)


@pytest.mark.parametrize(
    "module", [None, torch.nn.Identity(), torch.nn.LayerNorm(8), SimpleNamespace(weight=torch.zeros(2, 2).char())]
)
def test_a_head_that_is_no_matrix_of_numbers_is_refused(module) -> None:
    model = SimpleNamespace(get_output_embeddings=lambda: module)
    with pytest.raises(ModelError, match="not a matrix of floating-point weights"):
        Head(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 1e-4), (torch.float16, 0.01), (torch.bfloat16, 0.05), (torch.float64, 0.05)]
)
@pytest.mark.parametrize("size", [0.1, 8.0])
def test_logits_may_differ_by_a_share_of_the_largest_one(dtype, share, size) -> None:
    """Of 1, if the largest logit is smaller."""
    head = Head(Model(linear(dtype=dtype)))  # type: ignore[arg-type]
    head.weight = torch.eye(8)
    states = torch.zeros(1, 8)
    states[0, 3] = size
    limit = share * max(1.0, size)
    given = states.clone()
    given[0, 5] = 0.9 * limit
    head.check(states, given)
    given[0, 5] = -1.1 * limit
    with pytest.raises(ModelError, match="does more with these"):
        head.check(states, given)
    given[0, 5] = float("nan")
    with pytest.raises(ModelError, match="its logits differ by up to nan"):
        head.check(states, given)


@pytest.mark.parametrize("statistics", ["exact", "llamacpp"])
@pytest.mark.parametrize("rows", [1, 4, 6, 100])
def test_positions_in_parts_are_compared_as_at_once(rows, statistics, monkeypatch) -> None:
    head = Head(Model(linear()))  # type: ignore[arg-type]
    whole = compare_logits(head.logits(STATES), head.logits(OTHERS), TARGET, statistics)
    monkeypatch.setattr(heads, "LOGITS", rows * 20)
    found = head.compare(STATES, OTHERS, TARGET, statistics)
    for name in ("kld", "change", "same_top", "nll_base", "nll"):
        # products of fewer rows may be added up in another order
        close = 0.0 if rows >= 6 else {"exact": 1e-5, "llamacpp": 1e-4}[statistics]
        assert np.allclose(getattr(found.positions, name), getattr(whole.positions, name), rtol=0, atol=close), name
    assert np.allclose(found.gap, whole.gap, atol=1e-6) and np.array_equal(found.top, whole.top)


def test_no_position_is_compared_to_nothing() -> None:
    found = Head(Model(linear())).compare(STATES[:0], OTHERS[:0], TARGET[:0])  # type: ignore[arg-type]
    parts = (found.positions.kld, found.positions.nll, found.positions.nll_base, found.positions.change, found.gap)
    assert all(part.shape == (0,) and part.dtype == np.float64 for part in parts)
    assert found.positions.same_top.dtype == bool and found.top.dtype == np.int64 and found.top.shape == (0,)


def test_predictions_are_compared_by_hand() -> None:
    """Probabilities of 1/2, 1/4, 1/4 and of 1/4, 1/2, 1/4."""
    base, candidate = (torch.tensor([p]).log() for p in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    found = compare_logits(base, candidate, torch.tensor([0]))
    assert found.positions.kld == pytest.approx(0.25 * np.log(2)) and found.positions.change == pytest.approx(-0.25)
    assert found.positions.nll_base == pytest.approx(np.log(2)) and found.positions.nll == pytest.approx(np.log(4))
    assert found.gap == pytest.approx(np.log(2)) and found.top.tolist() == [0]
    assert found.positions.same_top.tolist() == [False]
    same = compare_logits(base, base * 1.0, torch.tensor([2]))
    assert same.positions.kld == 0 and same.positions.same_top.tolist() == [True]
    never = compare_logits(torch.tensor([[0.0, float("-inf"), 0.0]]), torch.zeros(1, 3), torch.tensor([0]))
    assert never.positions.kld == pytest.approx(np.log(1.5))  # what has no probability adds nothing


def test_digests_name_what_they_hash() -> None:
    model = Model(linear())
    before = digests(model)  # type: ignore[arg-type]
    assert set(before) == {"head", "norm"} and all(len(digest) == 64 for digest in before.values())
    with torch.no_grad():
        model.embed.weight.mul_(2)
    assert digests(model) == before  # type: ignore[arg-type]
    model.norm = torch.nn.Parameter(torch.ones(2))
    with_norm = digests(model)  # type: ignore[arg-type]
    assert with_norm["norm"] != before["norm"] and with_norm["head"] == before["head"]
    model.head = linear(dtype=torch.float64)
    assert digests(model)["head"] != before["head"]  # type: ignore[arg-type]
