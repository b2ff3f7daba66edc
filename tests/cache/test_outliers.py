"""Elements in full precision in addition to codes: stored, read, dropped and moved with their rows."""

import pytest
import torch

from kvbench.cache.segments.outliers import Outliers, block_of
from kvbench.errors import ConfigError

ALL = slice(None)


def dense(held: Outliers, row: int, heads: int, channels: int, tokens: int, first: int = 0) -> torch.Tensor:
    out = torch.zeros(heads, tokens - first * held.block, channels)
    held.write_into(out, row, first)
    return out


def case(batch: int, tokens: int, width: int, share: float = 0.05, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, width, generator=generator)
    return x, torch.rand(batch, tokens, width, generator=generator) < share


@pytest.mark.parametrize("width", [96, 1024, 8192, 65536])
def test_what_is_marked_comes_back_exactly(width):
    heads, tokens = 4, {96: 700, 1024: 150, 8192: 21, 65536: 11}[width]
    x, mask = case(3, tokens, width)
    mask[1] = False
    outliers = Outliers(3, width, torch.float32, torch.device("cpu"))
    assert outliers.block * width <= 1 << 16
    done = 0
    for step in (1, 2, tokens // 2, 1, 1):  # begins inside of blocks
        outliers.append(ALL, done, x[:, done : done + step], mask[:, done : done + step])
        done += step
    outliers.append(ALL, done, x[:, done:], mask[:, done:])
    expected = torch.where(mask, x, 0.0).unflatten(2, (heads, -1)).transpose(1, 2)
    for row in range(3):
        assert outliers.used(row) == (4 * int(mask[row].sum()), 2 * int(mask[row].sum()))
        assert torch.equal(dense(outliers, row, heads, width // heads, tokens), expected[row])
        begin = outliers.block  # from the second block on
        if begin < tokens:
            assert torch.equal(dense(outliers, row, heads, width // heads, tokens, 1), expected[row][:, begin:])


def test_newest_tokens_leave_and_others_take_their_place():
    x, mask = case(1, 300, 640, seed=1)
    mask[:, :, 0] = mask[:, :, -1] = True  # the first and the last element of a token
    other, marked = case(1, 300, 640, seed=2)
    outliers = Outliers(1, 640, torch.float32, torch.device("cpu"), capacity=4)
    outliers.append(ALL, 0, x, mask)
    for kept in (290, 256, 255, 64, 3, 0):
        outliers.keep_first(0, kept)
        assert outliers.count(0) == int(mask[0, :kept].sum())
    outliers.append(ALL, 0, x[:, :130], mask[:, :130])
    outliers.keep_first(0, 101)
    outliers.append(ALL, 101, other[:, 101:], marked[:, 101:])
    expected = torch.cat([torch.where(mask, x, 0.0)[:, :101], torch.where(marked, other, 0.0)[:, 101:]], 1)
    assert torch.equal(dense(outliers, 0, 5, 128, 300), expected[0].unflatten(1, (5, 128)).transpose(0, 1))


def test_rows_hold_different_numbers_of_entries_and_move():
    x, mask = case(2, 40, 64)
    outliers = Outliers(2, 64, torch.bfloat16, torch.device("cpu"))
    outliers.append(slice(0, 1), 0, x[:1], mask[:1])
    outliers.append(slice(1, 2), 0, x[1:, :7], mask[1:, :7])
    moved = outliers.mapped(lambda buffer: buffer.index_select(0, torch.tensor([1, 1, 0])))
    moved.select([1, 1, 0])
    assert [moved.count(row) for row in range(3)] == [outliers.count(1), outliers.count(1), outliers.count(0)]
    assert torch.equal(dense(moved, 2, 2, 32, 40), dense(outliers, 0, 2, 32, 40))
    moved.keep_first(0, 0)
    assert moved.count(1) == outliers.count(1)
    assert outliers.used(0) == (2 * outliers.count(0), 2 * outliers.count(0))


def test_the_oldest_blocks_leave_and_the_rest_moves_to_the_front():
    x, mask = case(2, 300, 640, seed=1)  # blocks of 64 tokens
    outliers = Outliers(2, 640, torch.float32, torch.device("cpu"), capacity=4)
    outliers.append(ALL, 0, x, mask)
    outliers.drop_first(0, 0)
    assert [outliers.count(row) for row in (0, 1)] == mask.sum((1, 2)).tolist()
    outliers.drop_first(0, 2)
    assert outliers.count(0) == int(mask[0, 128:].sum()) and outliers.count(1) == int(mask[1].sum())
    expected = torch.where(mask, x, 0.0).unflatten(2, (5, 128)).transpose(1, 2)
    assert torch.equal(dense(outliers, 0, 5, 128, 172), expected[0, :, 128:])
    assert torch.equal(dense(outliers, 1, 5, 128, 300), expected[1])
    outliers.append(slice(0, 1), 172, x[:1, :100], mask[:1, :100])
    assert torch.equal(dense(outliers, 0, 5, 128, 272), torch.cat([expected[0, :, 128:], expected[0, :, :100]], 1))
    outliers.drop_first(1, 9)  # more than there are
    assert outliers.count(1) == 0 and outliers.ends[1] == []
    outliers.append(slice(1, 2), 0, x[1:, :0], mask[1:, :0])  # nothing
    assert outliers.ends[1] == []


def test_blocks_hold_a_power_of_two_of_tokens_that_16_bits_can_index():
    sizes = {96: 128, 512: 128, 513: 64, 640: 64, 1024: 64, 4096: 16, 5120: 8, 65536: 1}
    assert {width: block_of(width) for width in sizes} == sizes


def test_buffers_grow_by_half_of_what_they_need():
    outliers = Outliers(1, 64, torch.float32, torch.device("cpu"), capacity=10)
    x, mask = torch.ones(1, 3, 64), torch.zeros(1, 3, 64).bool()
    mask[0, :, :8] = True
    outliers.append(ALL, 0, x[:, :1], mask[:, :1])
    assert outliers.values.shape == (1, 10)
    outliers.append(ALL, 1, x[:, 1:], mask[:, 1:])
    assert outliers.values.shape == outliers.indices.shape == (1, 36)
    assert (outliers.values.dtype, outliers.indices.dtype) == (torch.float32, torch.int16)


def test_more_channels_than_indices_are_refused():
    with pytest.raises(ConfigError, match=r"65537 channels .* at most 65536") as raised:
        Outliers(1, 65537, torch.float32, torch.device("cpu"))
    assert "method.outliers=0" in str(raised.value)
