"""A cache's knowledge of prompts, row by row."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.errors import CacheError


def test_an_expanded_batch_repeats_each_row_in_a_run():
    ids, mask = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    prompts = Prompts.from_batch(ids, mask, context_spans=[(0, 1), (1, 3)], queries=["a", "b"], decode=str)
    prompts.query_sources = ["template", None]
    prompts = prompts.repeat(2)
    assert [prompts.row_ids(row) for row in range(4)] == [[7, 8], [7, 8], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert prompts.starts == [2, 2, 0, 0] and prompts.lengths == [2, 2, 4, 4]
    assert prompts.context_spans == [(0, 1), (0, 1), (1, 3), (1, 3)] and prompts.queries == ["a", "a", "b", "b"]
    assert prompts.query_sources == ["template", "template", None, None] and prompts.decode is str
    bare = Prompts([0, 1], [5, 4]).repeat(3)
    assert bare.starts == [0, 0, 0, 1, 1, 1] and bare.width == 5
    assert (bare.context_spans, bare.queries, bare.input_ids, bare.query_sources) == (None, None, None, None)


def test_padding_is_read_from_the_mask_of_a_tokenizer():
    ids = torch.arange(8).view(2, 4)
    prompts = Prompts.from_batch(ids)
    assert (prompts.starts, prompts.lengths, prompts.width) == ([0, 0], [4, 4], 4)
    assert prompts.input_ids is ids and prompts.row_ids(1) == [4, 5, 6, 7]
    prompts = Prompts.from_batch(ids, torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]]))
    assert (prompts.starts, prompts.lengths, prompts.width) == ([1, 3], [3, 1], 4) and prompts.row_ids(1) == [7]
    for row in ([1, 1, 1, 0], [1, 0, 1, 1]):
        with pytest.raises(CacheError, match="row 1 of the attention mask has padding after its first token"):
            Prompts.from_batch(ids, torch.tensor([[1, 1, 1, 1], row]))


@pytest.mark.parametrize(
    ("starts", "lengths"), [([0, 1], [4, 4]), ([0, 4], [4, 0]), ([-1, 0], [5, 4]), ([], [])], ids=str
)
def test_rows_that_are_not_padded_on_the_left_are_refused(starts, lengths):
    with pytest.raises(CacheError, match=r"left.*tokenizer\.padding_side='left'") as raised:
        Prompts(starts, lengths)
    assert f"starts {starts} and lengths {lengths} " in str(raised.value)
