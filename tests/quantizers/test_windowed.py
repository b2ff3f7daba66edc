"""Blocks of tokens whose number is not a multiple of a group."""

from __future__ import annotations

import pytest
import torch

from kvbench.quantizers import AffineQuantizer
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


@pytest.mark.parametrize(("window", "groups", "size"), [(85, 2, 43), (42, 1, 42), (128, 2, 64), (130, 3, 44)])
def test_blocks_have_a_row_of_parameters_per_group(window, groups, size) -> None:
    quantizer = WindowedQuantizer(4, window, 64 if window != 130 else 50)
    scale, minimum = quantizer.parameters(torch.float16)
    assert scale == minimum and (scale.block_tokens, scale.block_rows) == (window, groups)
    assert (quantizer.block_tokens, quantizer.groups) == (window, groups)
    assert quantizer.group_size == size and quantizer.axis == "channel" and quantizer.levels == 15
    assert scale.shape(3 * window, 7) == (3 * groups, 7) and scale.row(2 * window) == 2 * groups
    assert scale.shape(3 * window - 1, 7) == (2 * groups, 7) and scale.nbytes(3 * window - 1, 7) == 2 * groups * 14
    assert WindowedQuantizer(4, 129).groups == 3  # groups have at most 64 tokens


@pytest.mark.parametrize("window", [85, 128])
def test_each_group_is_quantized_on_its_own(window) -> None:
    """Codes and parameters equal those of a quantizer of whole groups, applied to each group alone."""
    quantizer = WindowedQuantizer(4, window, 64)
    x = torch.randn(2, 3, 2 * window, 8, generator=torch.Generator().manual_seed(window)).half()
    codes, (scale, minimum) = quantizer.encode(x)
    decoded, first = quantizer.decode(codes, (scale, minimum), torch.float16), 0
    for number, size in enumerate([(window + 1) // 2, window // 2] * 2):
        alone = AffineQuantizer(4, size)
        part = slice(first, first + size)
        wanted, params = alone.encode(x[:, :, part])
        assert torch.equal(codes[:, :, part], wanted)
        assert torch.equal(scale[:, :, number : number + 1], params[0])
        assert torch.equal(minimum[:, :, number : number + 1], params[1])
        assert torch.equal(decoded[:, :, part], alone.decode(wanted, params, torch.float16))
        first += size
