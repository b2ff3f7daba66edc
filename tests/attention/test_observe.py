"""Attention that methods observe while a prompt is read in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.attention import observe
from kvbench.methods import load_method
from tests import zoo

WIDTH, SCALING = 30, 0.3


def inputs() -> tuple[Tensor, Tensor]:
    """Queries of 4 heads and keys of 2 for a batch of two prompts."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, 4, WIDTH, 8, generator=generator), torch.randn(2, 2, WIDTH, 8, generator=generator)


def observed(name: str, options: dict[str, Any], ends: list[int], mask: Tensor | None = None) -> Tensor:
    """The observation after chunks that end at `ends`."""
    layer, (queries, keys) = zoo.new_layer(load_method(name, **options)), inputs()
    for first, last in zip([0, *ends], ends, strict=False):
        part = None if mask is None else mask[:, :, first:last, :last]
        layer.observed = observe.extend(layer, queries[:, :, first:last], keys[:, :, :last], part, SCALING)
    return layer.observed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ends", [[30], [12, 30], [5, 6, 21, 30], [24, 30], [27, 30]], ids=str)
@pytest.mark.parametrize(
    ("name", "options"), [("h2o", {}), ("snapkv", {"window": 6, "budget": 16})], ids=["column sums", "last queries"]
)
def test_chunks_are_observed_as_one_prompt(name, options, ends, masked) -> None:
    queries, keys = inputs()
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    scores = SCALING * queries @ keys.repeat_interleave(2, 1).transpose(-1, -2)
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = weights.sum(2, keepdim=True) if name == "h2o" else weights[:, :, -6:]
    mask = causal[None, None] if masked else None
    torch.testing.assert_close(observed(name, options, ends, mask), expected)


def test_sums_are_in_fp32_whatever_torchs_default_dtype():
    """A kernel writes fp32 into them, for which a buffer of torch's default dtype might be too small."""
    layer = zoo.new_layer(load_method("h2o", budget=16))
    query, keys = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    wanted = observe.extend(layer, query, keys, None, 0.2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = observe.extend(layer, query, keys, None, 0.2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
