"""Tokens in KVQuant's format: any part of them reads as it does in the whole."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments.codebook import NuqFormat, NuqSegment

ALL = slice(None)


@pytest.mark.parametrize("side", ["key", "value"])
def test_reads_that_begin_and_end_within_a_block_of_outliers_are_parts_of_the_whole(side) -> None:
    x = torch.randn(2, 2, 300, 1024, generator=torch.Generator().manual_seed(0))
    thresholds = torch.tensor([[1.5], [-1.5]]).expand(2, 2048).half() if side == "key" else None
    form = NuqFormat(2, torch.tensor([-0.75, -0.25, 0.25, 0.75]), outliers=0.02, thresholds=thresholds)
    segment = NuqSegment(2, 2, 1024, torch.float32, "cpu", form=form, side=side)
    segment.append(ALL, x)
    whole = segment.read(ALL, 0, 300, torch.float32)
    exact = whole == x
    assert exact.any(-1).any(1).all()  # every token has an outlier
    assert segment.exact is not None and 1 < segment.exact.block < 300
    for start, stop in ((0, 1), (0, 33), (5, 20), (31, 97), (64, 65), (250, 300), (299, 300)):
        assert torch.equal(segment.read(ALL, start, stop, torch.float32), whole[:, :, start:stop])
