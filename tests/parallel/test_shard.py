"""What is refused before a model is cut."""

import pytest

from kvbench.errors import ModelError
from kvbench.parallel.shard import check
from tests import zoo


@pytest.mark.parametrize(("size", "most"), [(3, 2), (4, 2), (5, 2)])
def test_heads_that_the_ranks_cannot_share_evenly_are_refused(size: int, most: int) -> None:
    """4 query heads and 2 KV heads: four ranks can share the former alone."""
    said = f"4 query heads and 2 KV heads, which {size} processes cannot share evenly: torchrun --nproc-per-node {most}"
    with pytest.raises(ModelError, match=said):
        check(zoo.model("llama"), size)
    assert "colwise" in check(zoo.model("llama"), 2).values()
