"""The padding of a prompt, as its masks tell it."""

import pytest
import torch

from kvbench.cache.progress import Prefill, Progress


@pytest.mark.parametrize("chunks", [(12,), (4, 4, 4), (2, 3, 7), (1,) * 12])
@pytest.mark.parametrize("square", [False, True])
def test_padding_is_learnt_over_all_chunks_of_a_prompt(chunks, square):
    padding, progress, seen = [0, 5, 8, 4], Progress(Prefill(open=True)), 0
    real = torch.arange(12) >= torch.tensor(padding)[:, None]
    for count in chunks:
        mask = real[:, : seen + count]
        if square:
            mask = mask[:, None, None] & torch.ones(count, seen + count).tril(seen).bool()
        progress.see(mask, 4, count)
        seen += count
        assert progress.padding.starts == [min(each, seen) for each in padding]
