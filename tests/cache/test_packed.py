"""Packed segments: their buffers, their bytes, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.segments import packed
from kvbench.cache.segments.packed import PackedSegment, fits_tiles
from kvbench.quantizers import AffineQuantizer, AtomQuantizer, HierarchicalQuantizer
from kvbench.quantizers.affine import Parameter
from kvbench.quantizers.windowed import WindowedQuantizer
from tests import zoo

ALL = slice(None)
SHAPE = {"batch": 2, "heads": 2, "channels": 32, "dtype": torch.float32, "device": "cpu"}


def new(quantizer, side="key", **fields) -> PackedSegment:
    return PackedSegment(**{**SHAPE, **fields}, quantizer=quantizer, side=side)


@pytest.mark.parametrize(
    ("quantizer", "fits"),
    [
        (AffineQuantizer(4, 16), True),
        (WindowedQuantizer(2, 64, 64), True),
        (WindowedQuantizer(2, 128, 32), True),
        (WindowedQuantizer(2, 256, 64), True),
        (WindowedQuantizer(2, 42, 64), False),
        (WindowedQuantizer(2, 129, 64), False),  # groups of 43
        (WindowedQuantizer(2, 16, 64), False),  # groups of 16
        (WindowedQuantizer(2, 192, 64), False),  # groups fit, blocks do not
        (WindowedQuantizer(2, 127, 64), False),  # groups of 64 and 63
    ],
    ids=str,
)
def test_groups_fit_tiles_if_each_is_in_one_tile_or_fills_several(quantizer, fits):
    assert fits_tiles(quantizer) is fits
    groups = new(quantizer, capacity=256).params[0].shape[2]
    if isinstance(quantizer, WindowedQuantizer):
        beyond = 0 if fits else 2 * quantizer.window  # groups that begin in the last tile, and one more
        assert groups == (256 + beyond) // quantizer.window * quantizer.groups


def test_buffers_begin_with_zeros_in_the_dtype_of_parameters():
    torch.use_deterministic_algorithms(True)  # fills what is not initialized
    try:
        segments = [
            new(HierarchicalQuantizer(32), dtype=dtype, capacity=100) for dtype in (torch.float32, torch.bfloat16)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for segment, dtype in zip(segments, (torch.float32, torch.float16), strict=True):
        assert segment.capacity == 128 and [words.shape for words in segment.words] == [(2, 2, 1, 32, 32)] * 2
        assert [param.shape for param in segment.params] == [(2, 2, 4, 32)] * 2
        assert {param.dtype for param in segment.params} == {dtype}
        assert {words.dtype for words in segment.words} == {torch.int16}
        assert not any(buffer.any() for buffer in segment.words + segment.params)
        assert segment.buffers() == [
            *(("codes", words) for words in segment.words),
            *(("scales", param) for param in segment.params),
        ]


def test_no_tokens_are_packed_without_a_change():
    """As with a prompt that is shorter than the exact window."""
    segment = new(AffineQuantizer(4, 16))
    segment.append(ALL, torch.ones(2, 2, 0, 32))
    assert segment.lengths == [0, 0]


def test_buffers_grow_by_half_once_they_hold_tokens():
    segment = new(AffineQuantizer(4, 16, "token"))
    assert segment.capacity == 0
    sizes, x = [], zoo.random_kv(700, 2)[0]
    done = 0
    for count in (130, 126, 1, 300):
        segment.append(ALL, x[:, :, done : done + count])
        done += count
        sizes.append(segment.capacity)
    assert sizes == [256, 256, 512, 896]  # 2 tiles; 3 and half as many more; 5 and half as many more
    wanted = segment.quantizer.quantize(x[:, :, :557]).dequantize()
    assert torch.equal(segment.read(ALL, 0, 557, torch.float32), wanted)


def test_bytes_are_those_of_the_tokens_or_of_whole_tiles():
    segment = new(AffineQuantizer(4, 16, "token"), capacity=500)
    segment.append(ALL, zoo.random_kv(48, 2)[0])
    segment.drop_back(1, 5)
    assert segment.used(0) == {"codes": 2 * 48 * 32 // 2, "scales": 2 * 48 * 2 * 2 * 4}
    assert segment.used(1) == {"codes": 2 * 43 * 32 // 2, "scales": 2 * 43 * 2 * 2 * 4}
    tiles = new(AffineQuantizer(4, 16), dtype=torch.float16, whole_tiles=True)
    assert tiles.used(0) == {"codes": 0, "scales": 0}
    tiles.append(ALL, zoo.random_kv(48, 2)[0].half())
    assert tiles.used(0) == {"codes": 2 * 128 * 32 // 2, "scales": 2 * 8 * 32 * 2 * 2}
    blocks = new(WindowedQuantizer(2, 256, 64), dtype=torch.float16, whole_tiles=True)
    blocks.append(ALL, zoo.random_kv(256, 2)[0].half())
    assert blocks.used(0) == {"codes": 2 * 256 * 32 // 4, "scales": 2 * 4 * 32 * 2 * 2}
    few = new(AffineQuantizer(2, 1, "token"), heads=1, channels=3)
    few.append(ALL, torch.zeros(2, 1, 1, 3))
    assert few.used(0)["codes"] == 1  # 6 bits are a byte


def test_a_long_prompt_is_encoded_in_parts_of_whole_groups(monkeypatch):
    monkeypatch.setattr(packed, "ENCODED", 50)
    x = zoo.random_kv(160, 2)[0]
    index = torch.randperm(160, generator=torch.Generator().manual_seed(0))
    for quantizer in (AffineQuantizer(4, 16), AffineQuantizer(4, 16, "token"), WindowedQuantizer(4, 80, 64)):
        sizes, plain = [], quantizer.encode

        def counted(part, sizes=sizes, plain=plain):
            sizes.append(part.shape[2])
            return plain(part)

        monkeypatch.setattr(quantizer, "encode", counted)
        segment, chosen = new(quantizer), new(quantizer)
        segment.append(ALL, x)
        assert sizes == {1: [50, 50, 50, 10], 16: [48, 48, 48, 16], 80: [80, 80]}[quantizer.block_tokens]
        chosen.append_chosen(ALL, x, index)
        for made, tokens in ((segment, x), (chosen, x[:, :, index])):
            codes, params = plain(tokens)
            assert made.lengths == [160, 160]
            assert torch.equal(made.read(ALL, 0, 160, torch.float32), quantizer.decode(codes, params, torch.float32))


def test_a_prompt_that_fits_the_window_appends_no_tokens():
    segment = new(AffineQuantizer(4, 32, "channel"))
    segment.append(ALL, torch.zeros(2, 2, 0, 32))
    assert segment.lengths == [0, 0]


def test_rows_and_copies_keep_words_and_parameters():
    segment = new(AffineQuantizer(4, 16))
    x = zoo.random_kv(64, 2)[0]
    segment.append(ALL, x[:, :, :32])
    before, twin = segment.read(ALL, 0, 32, torch.float32), segment.clone()
    twin.drop_front(ALL, 16)
    twin.append(ALL, 5 * x[:, :, 32:])
    assert torch.equal(segment.read(ALL, 0, 32, torch.float32), before)
    segment.select(torch.tensor([1, 0, 1]))
    assert torch.equal(segment.read(ALL, 0, 32, torch.float32), before[[1, 0, 1]])
    assert segment.lengths == [32] * 3 and twin.lengths == [48, 48]


def test_tokens_of_a_group_cannot_leave_or_move_one_by_one():
    segment = new(AffineQuantizer(4, 16))
    segment.append(ALL, zoo.random_kv(32, 2)[0])
    with pytest.raises(TypeError, match="tokens of a per-channel group cannot be removed one by one"):
        segment.drop_back(0, 1)
    with pytest.raises(TypeError, match="tokens of a per-channel group cannot be moved one by one"):
        segment.permute(ALL, 0, torch.arange(16).flip(0))
    assert segment.lengths == [32, 32]


@pytest.mark.parametrize("quantizer", [AtomQuantizer(4, None, "token"), HierarchicalQuantizer(None, "token")], ids=str)
def test_tokens_that_leave_at_the_end_make_room_for_others(quantizer):
    segment, x = new(quantizer, side="value"), zoo.random_kv(60, 2)[0]
    segment.append(ALL, x[:, :, :40])
    segment.drop_back(1, 13)
    segment.append(slice(1, 2), x[1:, :, 40:])
    wanted = quantizer.quantize(torch.cat([x[1:, :, :27], x[1:, :, 40:]], 2)).dequantize()
    assert segment.lengths == [40, 47]
    assert torch.equal(segment.read(slice(1, 2), 0, 47, torch.float32), wanted)


class Crossed(AffineQuantizer):
    """A quantizer with parameters of three kinds: of a token, of a tile's channel, and one byte per 8 channels."""

    def __init__(self) -> None:
        super().__init__(4, None, "token")

    def parameters(self, dtype):
        return (
            *super().parameters(dtype),
            Parameter(torch.float32, "channel", 128),
            Parameter(torch.uint8, "token", 8, padding=1),
        )

    block_tokens = 128

    def encode(self, x):
        codes, params = super().encode(x)
        tiles = x.unflatten(2, (-1, 128)).amax(3)
        byte = torch.arange(5, dtype=torch.uint8).expand(*x.shape[:3], 5) + x[..., :1].gt(0)
        return codes, (*params, tiles, byte)

    def decode(self, codes, params, dtype):
        values = super().decode(codes, params[:2], dtype)
        return values + params[2].to(dtype).repeat_interleave(128, 2) + params[3][..., 2:3].to(dtype)


def test_parameters_may_differ_in_dtype_axis_and_group():
    quantizer, x = Crossed(), zoo.random_kv(512, 2)[0]
    segment = new(quantizer, capacity=128)
    segment.append(ALL, x[:, :, :256])
    segment.append(ALL, x[:, :, 256:])
    wanted = quantizer.decode(*quantizer.encode(x), torch.float32)
    assert torch.equal(segment.read(ALL, 0, 512, torch.float32), wanted)
    assert torch.equal(segment.read(ALL, 200, 300, torch.float32), wanted[:, :, 200:300])
    assert segment.used(0) == {"codes": 2 * 512 * 16, "scales": 2 * (512 * 2 * 4 + 4 * 32 * 4 + 512 * 5)}
    segment.drop_front(ALL, 128)
    assert torch.equal(segment.read(ALL, 0, 384, torch.float32), wanted[:, :, 128:])
    with pytest.raises(TypeError, match="cannot be removed one by one"):
        segment.drop_back(0, 1)
    segment.select(torch.tensor([1]))
    assert torch.equal(segment.read(ALL, 0, 384, torch.float32), wanted[1:, :, 128:])


def test_tokens_are_appended_to_rows_of_other_lengths_and_buffers_grow_by_half():
    """Row by row the same codes as one after the other; what a row had before is left as it was."""
    quantizer = AtomQuantizer(4, 32, "token")
    segment, alone = new(quantizer, capacity=128), [new(quantizer, batch=1) for _ in range(2)]
    x = zoo.random_kv(400, 2)[0]
    assert segment.appends_each(x)
    lengths, tiles = [124, 10], []
    for row in range(2):
        segment.append(slice(row, row + 1), x[row : row + 1, :, : lengths[row]])
        alone[row].append(ALL, x[row : row + 1, :, : lengths[row]])
    for count in (4, 1, 255, 1):
        part = torch.stack([x[row, :, lengths[row] : lengths[row] + count] for row in range(2)])
        segment.append_each(part)
        for row in range(2):
            alone[row].append(ALL, part[row : row + 1])
            lengths[row] += count
        tiles.append(segment.capacity // 128)
    assert segment.lengths == lengths == [385, 271]
    assert tiles == [1, 3, 3, 6]  # 128 fit, 129 need two tiles, 384 fit, 385 need four: and half of them more
    for row in range(2):
        one = slice(row, row + 1)
        assert torch.equal(segment.codes(one, 0, lengths[row]), alone[row].codes(ALL, 0, lengths[row]))
        wanted = alone[row].read(ALL, 0, lengths[row], torch.float32)
        assert torch.equal(segment.read(one, 0, lengths[row], torch.float32), wanted)
