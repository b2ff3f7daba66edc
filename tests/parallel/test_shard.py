"""How a layer is cut, and what is refused before."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.errors import ModelError
from kvbench.parallel.shard import check, cut
from tests import zoo


@pytest.mark.parametrize(("size", "most"), [(3, 2), (4, 2), (5, 2)])
def test_heads_that_the_ranks_cannot_share_evenly_are_refused(size: int, most: int) -> None:
    """4 query heads and 2 KV heads: four ranks can share the former alone."""
    said = (
        f"4 query heads and 2 KV heads, which {size} processes cannot share evenly.\n  hint: run "
        f"torchrun --nproc-per-node {most}"
    )
    with pytest.raises(ModelError, match=said):
        check(zoo.model("llama"), size)
    assert "colwise" in check(zoo.model("llama"), 2).values()


def test_a_bias_is_added_once_to_the_sum_of_the_ranks() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    parts: list[torch.Tensor] = []
    for rank in (0, 1):

        def noted(product: torch.Tensor) -> torch.Tensor:
            parts.append(product.detach().clone())
            return torch.stack(parts).sum(0)

        team: Any = SimpleNamespace(size=2, rank=rank, device=torch.device("cpu"), sum=noted)
        out = cut(copy.deepcopy(linear), "rowwise", team)(x[:, 3 * rank : 3 * rank + 3])
    torch.testing.assert_close(out, linear(x))  # of the last rank, with which the sum is whole
