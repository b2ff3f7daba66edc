"""Tokens in KVQuant's format: any part of them reads as it does in the whole."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments import codebook
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment
from kvbench.errors import NonFiniteError

ALL = slice(None)
LEVELS = torch.tensor([-0.75, -0.25, 0.25, 0.75])


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


def new(side: str, *, dtype: torch.dtype = torch.float32, capacity: int = 0, **fields) -> NuqSegment:
    """A segment of two rows and two heads of 32 channels; keys have thresholds of 1.5 and -1.5."""
    thresholds = torch.tensor([[1.5], [-1.5]]).expand(2, 64).half() if side == "key" else None
    form = NuqFormat(**{"bits": 2, "levels": LEVELS, "thresholds": thresholds, **fields})
    return NuqSegment(2, 2, 32, dtype, "cpu", form=form, side=side, capacity=capacity)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, count, 32, generator=torch.Generator().manual_seed(seed))


def nearest(x: torch.Tensor, scale: torch.Tensor | float, offset: torch.Tensor | float) -> torch.Tensor:
    """Each element rounded to the nearest level of its range."""
    distance = ((x - offset) / scale)[..., None] - LEVELS
    return LEVELS[distance.abs().argmin(-1)] * scale + offset


def test_keys_have_the_range_of_their_channel_and_values_that_of_their_token_over_all_heads():
    x = tokens(40)
    keys, values = new("key"), new("value")
    for segment in (keys, values):
        segment.append(ALL, x)
        assert segment.exact is None and segment.length(ALL) == 40 and segment.capacity == 128
    assert torch.equal(keys.read(ALL, 0, 40, torch.float32), nearest(x, 1.5, 0.0))
    low, high = x.amin((1, 3), keepdim=True), x.amax((1, 3), keepdim=True)
    wanted = nearest(x, (high - low) / 2, (high + low) / 2)
    torch.testing.assert_close(values.read(ALL, 0, 40, torch.float32), wanted, rtol=1e-5, atol=1e-5)


def test_values_are_decoded_by_the_codebook_that_was_calibrated_for_it():
    x = tokens(10)
    plain, restored = new("key"), new("key", restored=2 * LEVELS)
    for segment in (plain, restored):
        segment.append(ALL, x)
    assert torch.equal(plain.codes(ALL, 0, 10), restored.codes(ALL, 0, 10))
    assert torch.equal(restored.read(ALL, 2, 10, torch.float32), 2 * plain.read(ALL, 2, 10, torch.float32))


@pytest.mark.parametrize("side", ["key", "value"])
def test_bytes_are_those_of_codes_tables_and_outliers(side):
    segment = new(side, dtype=torch.float16, outliers=0.05, restored=LEVELS)
    segment.append(ALL, tokens(40).half())
    segment.append(slice(1, 2), tokens(3)[1:].half())
    assert segment.exact is not None
    for row, count in ((0, 40), (1, 43)):
        outliers = segment.exact.count(row)
        assert outliers
        tables = 2 * 4 * 4 + (2 * 64 * 2 if side == "key" else count * 2 * 2)
        assert segment.used(row) == {
            "codes": 64 * count // 4,
            "scales": tables,
            "window": 2 * outliers,
            "index": 2 * outliers,
        }
    names = [name for name, _ in segment.buffers()]
    assert names == ["codes", "scales", "scales", *(["scales"] if side == "value" else []), "index", "window", "index"]
    assert segment.buffers()[-2][1] is segment.exact.values and segment.buffers()[-1][1] is segment.exact.indices
    bare = new(side)
    bare.append(ALL, tokens(1))
    assert set(bare.used(0)) == {"codes", "scales"} and bare.used(0)["codes"] == 16


def test_outliers_of_keys_are_limited_on_either_side():
    x = tokens(40)
    x[0, 0, 7, :6] = torch.tensor([2.0, 4.0, 3.0, -2.0, -5.0, 1.0])
    segment, other = new("key", outliers=0.05, most=1), new("key", outliers=0.05)
    for made in (segment, other):
        made.append(ALL, x)
        assert made.exact is not None
    exact = segment.read(ALL, 0, 40, torch.float32) == x
    assert exact[0, 0, 7, :6].tolist() == [False, True, False, False, True, False]
    assert bool((exact.sum((1, 3)) <= 2).all())
    assert other.exact.count(0) == int((x[0].abs() > 1.5).sum())


@pytest.mark.parametrize("side", ["key", "value"])
def test_room_for_the_outliers_of_a_whole_prompt_is_made_at_once(side):
    segment = new(side, outliers=0.05, capacity=1000)
    assert segment.capacity == 1024 and segment.exact is not None
    assert segment.exact.values.shape == (2, int(1000 * 64 * 0.05 * 1.125))
    growing = new(side)
    sizes = []
    for _ in range(3):
        growing.append(ALL, tokens(200))
        sizes.append(growing.capacity)
    assert sizes == [256, 768, 768]  # 2 tiles; 4 and half as many more
    assert torch.equal(growing.read(ALL, 0, 200, torch.float32), growing.read(ALL, 400, 600, torch.float32))


@pytest.mark.parametrize("side", ["key", "value"])
def test_tokens_leave_at_either_end_with_their_outliers(side):
    x = tokens(400)
    segment = new(side, outliers=0.05)
    segment.append(ALL, x)
    whole = segment.read(ALL, 0, 400, torch.float32)
    segment.drop_back(0, 130)
    assert segment.lengths == [270, 400]
    segment.append(slice(0, 1), x[:1, :, 270:])
    assert torch.equal(segment.read(ALL, 0, 400, torch.float32), whole)
    assert segment.exact is not None and segment.exact.block == 128
    with pytest.raises(ValueError, match=r"100 tokens.* not a multiple of the block size, 128"):
        segment.drop_front(ALL, 100)
    segment.drop_front(slice(1, 2), 256)
    assert segment.lengths == [400, 144]
    assert torch.equal(segment.read(slice(1, 2), 0, 144, torch.float32), whole[1:, :, 256:])
    assert torch.equal(segment.read(slice(0, 1), 0, 400, torch.float32), whole[:1])
    segment.drop_front(slice(1, 2), 144)  # all of them, whole blocks or not
    assert segment.lengths == [400, 0] and segment.exact.count(1) == 0
    segment.append(slice(1, 2), x[1:])
    assert torch.equal(segment.read(ALL, 0, 400, torch.float32), whole)
    free = new(side)
    free.append(ALL, x)
    free.drop_front(ALL, 33)  # without outliers any number of tokens
    assert free.lengths == [367, 367]


@pytest.mark.parametrize("side", ["key", "value"])
def test_rows_and_copies_have_tables_and_outliers_of_their_own(side):
    segment = new(side, outliers=0.05)
    x = tokens(20)
    segment.append(ALL, x)
    before, twin = segment.read(ALL, 0, 20, torch.float32), segment.clone()
    twin.drop_back(0, 15)
    twin.append(slice(0, 1), 3 * x[:1, :, 5:])
    assert torch.equal(segment.read(ALL, 0, 20, torch.float32), before)
    segment.select(torch.tensor([1, 0, 1]))
    assert torch.equal(segment.read(ALL, 0, 20, torch.float32), before[[1, 0, 1]])
    assert len(segment.codebook) == 3 and (segment.thresholds is None or len(segment.thresholds) == 3)
    segment.drop_back(0, 20)
    assert segment.lengths == [0, 20, 20]
    assert torch.equal(segment.read(slice(1, 3), 0, 20, torch.float32), before[[0, 1]])


@pytest.mark.parametrize("side", ["key", "value"])
def test_heads_that_are_divided_between_processes_are_stored_as_by_one(side):
    """A value's range and outliers are those of its token over all heads; a key's thresholds those of its channels."""
    x = tokens(30)
    thresholds = torch.stack([torch.linspace(0.5, 2.0, 64), -torch.linspace(0.8, 1.2, 64)]).half()
    fields = {"outliers": 0.05, "thresholds": thresholds if side == "key" else None}
    whole = new(side, **fields)
    whole.append(ALL, x)
    parts = []
    for head in (0, 1):

        def gather(mine: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).flatten(2)

        form = NuqFormat(2, LEVELS, heads=(head, 1), gather=gather, **fields)
        segment = NuqSegment(2, 1, 32, torch.float32, "cpu", form=form, side=side)
        segment.append(ALL, x[:, head : head + 1])
        parts.append(segment.read(ALL, 0, 30, torch.float32))
    assert torch.equal(torch.cat(parts, 1), whole.read(ALL, 0, 30, torch.float32))


def test_decoded_values_stay_within_the_range_of_fp16():
    segment = new("value", dtype=torch.bfloat16)
    x = tokens(2).bfloat16()
    x[:, :, 0] = torch.linspace(1e5, 2e5, 32)
    segment.append(ALL, x)
    decoded = segment.read(ALL, 0, 2, torch.float16)
    assert decoded.dtype == torch.float16 and bool((decoded[:, :, 0] == 65504).all())
    assert segment.read(ALL, 0, 2, torch.bfloat16).dtype == torch.bfloat16


def test_what_is_not_finite_is_refused_and_a_long_prompt_is_encoded_in_parts(monkeypatch):
    bad = tokens(3)
    bad[1, 0, 2, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\(1, 0, 2, 5\)"):
        new("key").append(ALL, bad)
    x, whole = tokens(40), new("value", outliers=0.05)
    whole.append(ALL, x)
    monkeypatch.setattr(codebook, "ENCODED", 7)
    parts = new("value", outliers=0.05)
    parts.append(ALL, x)
    assert torch.equal(parts.read(ALL, 0, 40, torch.float32), whole.read(ALL, 0, 40, torch.float32))
    assert parts.exact is not None and whole.exact is not None and parts.exact.ends == whole.exact.ends
