"""What a cache is told about prompts, row by row."""

import torch

from kvbench.cache import Prompts


def test_an_expanded_batch_repeats_each_row_in_a_run():
    ids, mask = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    prompts = Prompts.from_batch(ids, mask, context_spans=[(0, 1), (1, 3)], queries=["a", "b"]).repeat(2)
    assert [prompts.row_ids(row) for row in range(4)] == [[7, 8], [7, 8], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert prompts.starts == [2, 2, 0, 0] and prompts.lengths == [2, 2, 4, 4]
    assert prompts.context_spans == [(0, 1), (0, 1), (1, 3), (1, 3)] and prompts.queries == ["a", "a", "b", "b"]
