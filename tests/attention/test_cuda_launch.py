"""The host's part of the CUDA kernel, without a GPU: configurations, arguments of a launch, refusals."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention.cuda import config, storage
from kvbench.attention.cuda import decode as cuda_build
from kvbench.attention.cuda import decode as cuda_decode
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL, Piece, groups_of, layer

#: shared memory of a CTA on an H200
H200 = 227 * 1024
KEY, VALUE = Format("affine", 4, "channel", 64), Format("affine", 4, "token", 64)


def work(key: Format = KEY, value: Format = VALUE, dims: tuple[int, int] = (64, 64), heads: int = 2) -> Any:
    sides = [[Piece(form, [256]), Piece(FULL, [9])] for form in (key, value)]
    return layer(*sides, heads=heads, key_dim=dims[0], value_dim=dims[1])


def query(heads: int = 2, count: int = 1, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(1, heads, count, 64, dtype=dtype)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine on which everything compiles, and what was compiled."""
    asked: list[Any] = []
    monkeypatch.setattr(cuda_decode, "available", lambda: None)
    monkeypatch.setattr(cuda_decode, "cuda_problem", lambda *given: asked.append(given))
    return asked


def test_what_it_cannot_read_is_refused(compiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_decode.refuses(query(8, 3), work()) is None
    assert compiles == [(((KEY, VALUE), (FULL, FULL)), 64, 12, False, 0, False, 0)]
    wide = Format("affine", 4, "token", 128)
    for given, made, message in (
        (query(), work(dims=(64, 128)), "heads of 64 and 128 channels"),
        (query(), work(dims=(32, 32), value=Format("affine", 4, "token", 32)), "heads of 32 channels"),
        (query(dtype=torch.float32), work(), "float32"),
        (query(), work(value=KEY), "values in groups per channel"),
        (
            query(),
            work(key=Format("affine", 2, "channel", 17, 17)),
            "windows of 17 tokens in groups of 17: over 8 groups",
        ),
        (query(), work(key=wide), "groups of 128 channels"),
        (query(), work(dims=(256, 256), value=Format("affine", 4, "token", 16)), "values in 16 groups a token"),
        (query(dtype=torch.bfloat16), work(), "queries in bfloat16, but keys in float16"),
        (query(), work(key=Format("levels", 2, "token", 64)), "keys in 2-bit codes"),
        (query(), work(key=Format("levels", 4, "token", 32)), "keys in groups of 32 channels"),
        (query(), work(value=Format("levels", 4, "token", 64)), "values in codes of the kind levels"),
        (query(), work(key=Format("float", 4, "token", 64, 0, "e4m3")), "keys in groups of 64 channels"),
        (
            query(),
            work(key=Format("cross", 4, "channel", 128), value=Format("cross", 4, "token", 32)),
            "values in groups of 32 channels",
        ),
    ):
        assert message in str(cuda_decode.refuses(given, made)), message
    monkeypatch.setattr(cuda_decode, "available", lambda: "there is no GPU")
    assert cuda_decode.refuses(query(), work()) == "there is no GPU"


def test_a_configuration_is_the_fastest_that_fits() -> None:
    """Two CTAs a multiprocessor if both rings fit into 160 KiB, else one with more teams."""
    packed = ((Format("affine", 4, "channel", 128), Format("affine", 4, "token", 128)),)
    made = config.build(packed, 128, 1, True, H200)
    assert (made.team, made.teams, made.stages, made.resident, made.rows, made.warps) == (1, 4, 2, 2, 4, 4)
    assert made.slot == 8704 and made.shared == 2 * 128 // 16 * 256 + 4 * 2 * 8704
    assert config.build(packed, 128, 1, False, H200).shared == 128 // 16 * 256 + 4 * 2 * 8704
    full = config.build(((FULL, FULL),), 64, 1, False, H200)
    assert full.slot == 32 * 64 * 2 and full.rows == 4 and storage.slot_bytes(FULL, 64) == 0
    eight = ((Format("affine", 8, "channel", 32), Format("affine", 8, "token", 32)),)  # slots of 18 KiB
    wide = config.build(eight, 128, 5, True, H200)
    assert (wide.team, wide.shares, wide.teams, wide.resident, wide.rows) == (2, 2, 4, 1, 8)
    dense = tuple(tuple(replace(form, bits=3) for form in pair) for pair in packed)
    assert config.build(dense, 128, 1, True, H200).teams == 8  # bound by unpacking: one CTA has fewer results to merge
    fine = ((Format("affine", 8, "channel", 16), Format("affine", 8, "token", 16)),)
    assert [config.build(fine, 128, rows, True, H200).shares for rows in (1, 20)] == [1, 1]
    huge = config.build(packed, 256, 20, True, H200)  # heads of 256 channels leave registers for one block of rows
    assert (huge.team, huge.shares, huge.blocks, huge.rows) == (3, 1, 1, 24)
    several = {rows: config.build(packed, 128, rows, True, H200) for rows in (9, 16, 17, 25, 33)}
    assert {rows: (some.team, some.shares, some.blocks) for rows, some in several.items()} == {
        9: (1, 1, 2), 16: (1, 1, 2), 17: (2, 2, 3), 25: (1, 1, 2), 33: (2, 2, 3)
    }  # fmt: skip
    tuned = config.build(packed, 128, 9, True, H200, (("teams", 2), ("stages", 3), ("resident", 1)))
    assert (tuned.team, tuned.teams, tuned.stages, tuned.resident, tuned.rows) == (1, 2, 3, 1, 16)
    small = config.build(packed, 128, 9, True, 40 * 1024)
    assert (small.teams, small.resident) == (1, 1)  # the last resort
    lines = config.build(packed, 128, 4, True, H200, softcap=True, sinks=2).macros().splitlines()
    assert lines == [
        f"#define {name} {value}"
        for name, value in (
            ("D", 128), ("TEAM", 1), ("SHARES", 1), ("NT", 1), ("ONECOL", 1), ("BF16", 1),
            ("TEAMS", 4), ("STAGES", 2), ("MINB", 2),
            ("SLOT", 8704), ("SCRATCH", 0), ("SOFTCAP", 1), ("SINKS", 2), ("INTEGER", 0),
                ("DIGIT_BYTES", 0), ("ONEROW", 0),
            ("NPHASES", 1),
            ("PHASE_TABLE", "{{1, 4, 0, 128, 1, 1, 4, 1, 128, 1}}"), ("WINDOW_TABLE", "{0}"), ("MET", 1), ("SLOTS", 1),
        )
    ]  # fmt: skip


def test_one_query_row_multiplies_two_bits_as_integers() -> None:
    """Not several rows, other bits, keys per token, groups that fit no tile, softcaps, or two warps for a tile."""
    two = ((Format("affine", 2, "channel", 32), Format("affine", 2, "token", 64)), (FULL, FULL))
    assert config.build(two, 128, 1, True, H200).integer
    assert "#define INTEGER 1\n" in config.build(two, 64, 1, False, H200).macros()
    assert not config.build(two, 128, 4, True, H200).integer
    assert not config.build(two, 128, 1, True, H200, fast_integers=False).integer
    assert not config.build(two, 80, 1, True, H200).integer
    assert not config.build(two, 128, 1, True, H200, softcap=True).integer
    assert not config.build(two, 128, 1, True, H200, (("team", 2), ("shares", 2))).integer
    for key in (Format("affine", 4, "channel", 32), Format("affine", 2, "token", 64), Format("atom", 2, "channel", 32)):
        assert not config.build(((key, two[0][1]), (FULL, FULL)), 128, 1, True, H200).integer
    windows = ((Format("affine", 2, "channel", 42, 42), two[0][1]), *two)
    assert not config.build(windows, 128, 1, True, H200).integer


def test_a_row_takes_a_column_for_each_group_that_a_tile_may_meet() -> None:
    """Tiles begin at every second token of a window of 42, so that none meets five of its groups."""
    for window, group, met in ((42, 42, 4), (85, 43, 4), (30, 30, 8), (200, 50, 4), (129, 65, 4), (17, 17, 16)):
        form = Format("affine", 2, "channel", group, window)
        assert storage.groups_met(form) == met, window
        most = len(set(groups_of(form, torch.arange(128 * window)).view(-1, 128)[0].tolist()))
        for tile in groups_of(form, torch.arange(128 * window)).view(-1, 128):
            most = max(most, len(set(tile.tolist())))
        assert met // 2 < most <= met
    key = Format("affine", 2, "channel", 42, 42)
    phases = ((key, Format("affine", 2, "token", 64)), (FULL, FULL))
    one, grouped = (config.build(phases, 128, rows, True, H200) for rows in (1, 4))
    assert (one.one_column, one.rows, one.columns) == (True, 1, 4)
    assert (grouped.one_column, grouped.rows, grouped.columns) == (False, 4, 16)
    assert "#define WINDOW_TABLE {42, 0}\n#define MET 4\n#define SLOTS 4\n" in one.macros()
    integers = config.build(phases, 128, 1, True, H200, (("integer", 1),))
    assert integers.rows == 4 and "#define MET 4\n#define SLOTS 1\n" in integers.macros()
    assert "#define WINDOW_TABLE {42, 0}\n#define MET 4\n#define SLOTS 4\n" in grouped.macros()
    assert storage.slot_bytes(key, 128) == 4096 + 2 * 4 * (256 + 16)
    windowed = work(key=Format("affine", 2, "channel", 42, 42))
    packed = cuda_decode.pack(*windowed.phases[0])
    assert struct.unpack("8P4i2P2f", packed)[10:12] == (windowed.phases[0][0].params[0].shape[2], 0)


def test_no_pragma_stands_where_nvcc_drops_what_follows() -> None:
    """Directly behind `if constexpr (...)`, without a brace, it took the rest of the block along, without a word."""
    assert not re.search(r"if constexpr \([^\n]*\)\n\s*#pragma", cuda_build.cuda_source())


def test_the_source_is_all_of_its_files_in_order() -> None:
    text = cuda_build.cuda_source()
    assert text.index("struct Args") < text.index("decode(")


@pytest.mark.parametrize("splits", [None, 3, 500, 0])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_launch_is_told_what_lies_where(
    cap: float | None, splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    compiled = SimpleNamespace(
        build=SimpleNamespace(rows=4, columns=4, teams=2), resident=264, launch=lambda *given: launched.append(given)
    )
    kinds: list[Any] = []
    monkeypatch.setattr(cuda_decode, "cuda_kernel", lambda *given: kinds.append(given) or compiled)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    room = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    rooms: list[Any] = []
    monkeypatch.setattr(cuda_decode, "workspace", lambda *given: rooms.append(given) or room)
    made, sinks = work(), torch.arange(6.0)
    made.logits = Logits(cap, sinks if cap else None)
    asked = torch.randn(1, 3, 6, 64).half().transpose(1, 2)  # 6 query heads of 2 KV heads, 3 new tokens: 9 rows each
    out = cuda_decode.attend(asked, made, 0.25, (("teams", 2),), splits)
    assert out.shape == (1, 3, 6, 64) and out.dtype == torch.float16
    assert kinds == [(made.signature(), 64, 9, False, 0, (("teams", 2),), cap is not None, 2 if cap else 0)]
    ((grid, arguments, stream),) = launched
    parts = {None: cuda_decode.best_splits(6, 264, made.tiles(), 2), 3: 3, 500: 128, 0: 1}[splits]
    assert grid == (parts, 2, 3) and stream == 77 and rooms == [(0, 77, 6 * parts * 4 * 66, 6)]
    (key, value), (exact_k, exact_v) = made.phases
    phases = struct.calcsize("8P4i2P2f")
    assert struct.unpack("8P4i2P2f", arguments[:phases])[:12] == (
        key.words[0].data_ptr(), 0, key.params[0].data_ptr(), key.params[1].data_ptr(),
        value.words[0].data_ptr(), 0, value.params[0].data_ptr(), value.params[1].data_ptr(), 2, 2, 0, 0,
    )  # fmt: skip
    assert struct.unpack("8P4i2P2f", arguments[phases : 2 * phases])[:12] == (
        exact_k.buffer.data_ptr(), 0, 0, 0, exact_v.buffer.data_ptr(), 0, 0, 0,
        exact_k.buffer.shape[2], exact_v.buffer.shape[2], 0, 0,
    )  # fmt: skip
    rest = struct.unpack("PP3qPPP4i2fP", arguments[2 * phases :])
    strides = asked.stride()[:3]
    assert rest[:8] == (
        made.table.data_ptr(), asked.data_ptr(), *strides, out.data_ptr(), room[0].data_ptr(), room[1].data_ptr()
    )  # fmt: skip
    assert rest[8:12] == (2, 3, 3, parts)
    log2e = 1.4426950408889634
    wanted = (0.25 * log2e, 0.0) if cap is None else (2 * 0.25 * log2e / cap, cap * log2e)
    assert rest[12:14] == pytest.approx(wanted) and rest[14] == (0 if cap is None else sinks.data_ptr())


def test_sinks_are_read_in_the_querys_dtype_or_in_fp32() -> None:
    made = work()
    for sinks, wanted in ((None, 0), (torch.zeros(2).half(), 1), (torch.zeros(2), 2), (torch.zeros(2).bfloat16(), 2)):
        made.logits = Logits(3.0, sinks)
        assert cuda_decode.extras(query(), made) == (True, wanted)
    eight = work(Format("affine", 8, "channel", 64), Format("affine", 8, "token", 64))
    key, value = eight.phases[0]
    assert struct.unpack("8P4i2P2f", cuda_decode.pack(key, value))[1] == key.words[1].data_ptr()


def test_a_step_is_shared_by_as_many_ctas_as_have_tiles() -> None:
    assert cuda_decode.best_splits(1, 264, 1, 4) == 1 and cuda_decode.best_splits(1, 264, 9, 4) == 3
    assert cuda_decode.best_splits(1, 264, 10**6, 4) == 128
