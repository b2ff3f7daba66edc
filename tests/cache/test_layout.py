"""Tiles: every code has its place, and writing one leaves the others alone."""

import pytest
import torch

from kvbench.cache.segments.layout import TILE, TileLayout


@pytest.mark.parametrize("order", ["key", "value"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_any_run_is_written_in_place_and_read_back(order, width):
    layout = TileLayout(width, order)
    generator = torch.Generator().manual_seed(width)
    words = torch.randint(-(2**15), 2**15, (2, 3, *layout.shape(4, 16)), generator=generator).to(torch.int16)
    expected = layout.unpack(words).clone()
    for start, count in ((0, 512), (5, 1), (31, 2), (100, 200), (127, 129), (256, 128), (511, 1), (3, 60)):
        codes = torch.randint(0, 1 << width, (2, 3, count, 16), dtype=torch.uint8, generator=generator)
        layout.write(words, start, codes)
        expected[:, :, start : start + count] = codes.to(torch.int16)
        assert torch.equal(layout.unpack(words), expected)
        assert torch.equal(layout.read(words, start, start + count), codes.to(torch.int16))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_field_i_of_word_r_is_token_i_n_plus_r(width):
    layout = TileLayout(width, "key")
    codes = torch.randint(0, 1 << width, (TILE, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = layout.pack(codes)[0]
    for row in (0, layout.rows - 1):
        for field in range(layout.fields):
            got = (words[row].to(torch.int32) & 0xFFFF) >> (field * width) & ((1 << width) - 1)
            assert torch.equal(got, codes[field * layout.rows + row].to(torch.int32))
    assert torch.equal(TileLayout(width, "value").pack(codes)[0], words.T)


def test_storage_is_exact():
    for width in (1, 2, 4):
        tiles, rows, channels = TileLayout(width, "key").shape(3, 64)
        assert tiles * rows * channels * 2 * 8 == 3 * TILE * 64 * width
