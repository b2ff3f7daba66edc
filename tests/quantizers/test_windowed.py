"""Blocks of tokens whose number is not a multiple of a group."""

from __future__ import annotations

import pytest
import torch

from kvbench.quantizers.windowed import WindowedQuantizer


@pytest.mark.parametrize(
    ("window", "most", "sizes"),
    [(85, 64, [43, 42]), (42, 64, [42]), (128, 64, [64, 64]), (130, 50, [44, 43, 43]), (134, 50, [45, 45, 44])],
)
def test_a_block_is_cut_into_even_groups_the_longer_ones_first(window, most, sizes) -> None:
    quantizer = WindowedQuantizer(2, window, most)
    levels = torch.arange(1, 2 * len(sizes) + 1).float()  # another value in each group of both blocks
    x = levels.repeat_interleave(torch.tensor(sizes * 2)).view(1, 1, 2 * window, 1).expand(1, 1, -1, 4).contiguous()
    codes, (scale, minimum) = quantizer.encode(x)
    assert bool((scale == 0).all())  # no group holds two values
    assert minimum[0, 0, :, 0].tolist() == levels.tolist()
    assert torch.equal(quantizer.decode(codes, (scale, minimum), torch.float32), x)
