"""Compile-time parameters of the packing kernels, and the programs that write a run of tokens."""

from __future__ import annotations

import pytest

from kvbench.cache.kernels.jobs import Form, packing_form, programs, windows, word_rows


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # kind, bits, by channel, group, channels, fp16 -> ..., word rows, channels, programs of a tile, warps
        (("affine", 4, True, 32, 128, True), Form("affine", 4, True, 32, 32, 64, 2, 1)),
        (("affine", 2, True, 32, 128, True), Form("affine", 2, True, 32, 16, 64, 2, 2)),
        (("affine", 4, True, 32, 128, False), Form("affine", 4, True, 32, 32, 64, 2, 4)),
        (("affine", 4, True, 64, 80, False), Form("affine", 4, True, 64, 32, 16, 5, 2)),
        (("affine", 4, False, 128, 128, True), Form("affine", 4, False, 128, 16, 128, 2, 2)),
        (("affine", 8, False, 128, 256, True), Form("affine", 8, False, 128, 16, 128, 4, 2)),
        (("affine", 2, False, 32, 96, True), Form("affine", 2, False, 32, 16, 32, 3, 2)),
        (("affine", 2, False, 8, 8, True), Form("affine", 2, False, 8, 16, 8, 1, 2)),
        (("atom", 4, False, 64, 64, False), Form("atom", 4, False, 64, 32, 64, 1, 4)),
        (("hierarchical", 8, True, 128, 128, True), Form("hierarchical", 8, True, 128, 32, 64, 2, 4)),
        (("affine", 3, True, 32, 128, True), Form("affine", 3, True, 32, 16, 64, 2, 4)),
        (("affine", 3, False, 128, 128, True), Form("affine", 3, False, 128, 16, 128, 1, 4)),
        (("affine", 4, True, 48, 128, True), "groups of 48 tokens"),
        (("affine", 4, True, 4, 128, True), "groups of 4 tokens"),
        (("affine", 4, True, 256, 128, True), "groups of 256 tokens"),
        (("affine", 4, True, 32, 24, True), "heads of 24 channels"),
        (("affine", 4, False, 64, 96, True), "groups of 64 channels"),
    ],
    ids=str,
)
def test_a_tile_is_divided_among_programs(asked, expected):
    assert packing_form(*asked) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((2, 42, 64, 128, True), Form("affine", 2, True, 64, 16, 64, 2, 2, 42)),
        ((8, 85, 64, 96, False), Form("affine", 8, True, 64, 32, 32, 3, 2, 85)),
        ((4, 8, 8, 16, True), Form("affine", 4, True, 8, 32, 16, 1, 2, 8)),
        ((3, 42, 64, 128, True), "windows of 42 tokens in 3-bit codes"),
        ((2, 17, 8, 128, True), "windows of 17 tokens in groups of 5 tokens"),
        ((2, 65, 128, 128, True), "windows of 65 tokens in groups of 65 tokens"),
        ((2, 42, 64, 24, True), "heads of 24 channels"),
    ],
    ids=str,
)
def test_windows_that_fit_no_tile_have_programs_of_whole_tiles(asked, expected):
    assert windows(*asked) == expected


def test_programs_are_those_of_the_tiles_or_of_the_word_row_of_a_single_token():
    assert [word_rows(bits) for bits in (2, 4, 8)] == [16, 32, 32]
    by_token = packing_form("affine", 8, False, 128, 256, True)
    by_channel = packing_form("affine", 4, True, 32, 128, True)
    assert isinstance(by_token, Form) and isinstance(by_channel, Form)
    single = Form("affine", 8, False, 128, 1, 128, 64, 1)
    assert programs(by_token, 5, 1) == (single, 10, 2)
    assert programs(by_token, 128 + 70, 1) == (single, 2 * (70 - 64), 2)
    assert programs(by_token, 100, 28) == (by_token, 0, 4) and programs(by_token, 100, 29) == (by_token, 0, 8)
    assert programs(by_channel, 128, 256) == (by_channel, 0, 4) and programs(by_channel, 96, 1) == (by_channel, 0, 2)
    assert programs(by_channel, 128, 0) == (by_channel, 0, 2)  # warming up
