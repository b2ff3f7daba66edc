"""The host part of the kernel for codes of a codebook: what it refuses, its configuration, and its launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention.codebook import decode
from kvbench.attention.codebook import decode as codebook_build
from kvbench.attention.codebook import decode as looked_up
from kvbench.attention.codebook.decode import CodebookBuild, choose_warps
from kvbench.attention.cuda.decode import best_splits
from kvbench.attention.logits import Logits
from tests.attention.codebook_support import layer

#: shared memory of a CTA on an H200
H200 = 227 * 1024
PLAIN = CodebookBuild(128, 3, 4, 8, 32, True, 2, 1, True, True)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine on which everything compiles, and what was compiled."""
    asked: list[Any] = []
    monkeypatch.setattr(looked_up, "missing", lambda: None)
    monkeypatch.setattr(looked_up, "codebook_problem", lambda *given: asked.append(given))
    return asked


def query(heads: int = 4, count: int = 1, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(1, heads, count, 64, dtype=dtype)


def test_what_it_cannot_read_is_refused(compiles, monkeypatch):
    made = layer([(2, 9, 1)]).work
    assert looked_up.refuses(query(), made) is None
    assert compiles == [(looked_up.configured(query(), made), 0)]
    assert "2 new tokens" in looked_up.refuses(query(count=2), made)
    made.value_dim = 128
    assert looked_up.refuses(query(), made) == "heads of 64 and 128 channels"
    made.value_dim = 64
    first, codes, last = made.phases

    def said(*phases, counts=None) -> str:
        other = replace(made, phases=list(phases))
        other.counts = counts or [[(0, 0, 2)] * len(phases)]
        return str(looked_up.refuses(query(), other))

    assert said(first, codes, last) == said(codes) == said(codes, last) == said(first, codes) == "None"
    crossed = (codes[0], last[1])
    assert "packed at different tokens" in said(first, crossed, last)
    assert "packed at different tokens" in said(first, codes, codes)
    assert "packed at different tokens" in said(first, last)
    wide = (codes[0], replace(codes[1], format=replace(codes[1].format, bits=4)))
    assert said(first, wide, last) == "keys of 3 and values of 4 bits"
    for phases in ((first, first, codes), (codes, last, last)):
        assert "more than one run" in said(*phases)
    for counts in ((1, 0, 2), (0, 1, 2)):
        assert "more than one run" in said(codes, last, counts=[[(0, 0, 2), (0, 0, 1)], [counts, (0, 0, 1)]])
    longer = replace(last[1], buffer=torch.zeros(1, 2, last[1].buffer.shape[2] + 1, 64).half())
    assert "buffers of keys and of values of different lengths" in said(first, codes, (last[0], longer))

    def with_books(change_key, change_value) -> tuple[Any, Any]:
        return tuple(
            replace(part, codebook=replace(part.codebook, outliers=change(part.codebook.outliers)))
            for part, change in zip(codes, (change_key, change_value), strict=True)
        )

    def same(found):
        return found

    def blocks(tokens):
        return lambda found: SimpleNamespace(values=found.values, block=tokens)

    for pair in (with_books(same, lambda found: None), with_books(lambda found: None, same)):
        assert said(first, pair, last) == "outliers of keys or of values alone"
    assert said(first, with_books(*[lambda found: None] * 2), last) == "None"
    single = SimpleNamespace(values=torch.zeros(1), block=4)
    for pair in (with_books(lambda found: single, same), with_books(same, lambda found: single)):
        assert said(first, pair, last) == "queries and outliers differ in dtype"
    assert said(first, with_books(blocks(4), blocks(4)), last) == "None"
    assert said(first, with_books(blocks(4), blocks(2)), last) == "blocks of 2 tokens of outliers"
    monkeypatch.setattr(looked_up, "missing", lambda: "there is no GPU")
    assert looked_up.refuses(query(), made) == "there is no GPU"


def test_a_kernel_that_does_not_compile_or_fit_is_a_problem(monkeypatch):
    def fails(build, device):
        raise RuntimeError("nvrtc said no\nand much more")

    for device, (kernel, wanted) in enumerate(
        (
            (fails, "not compiled: nvrtc said no"),
            (lambda build, device: SimpleNamespace(resident=0), "a multiprocessor of this GPU has no room for it"),
            (lambda build, device: SimpleNamespace(resident=1), None),
        )
    ):
        monkeypatch.setattr(looked_up, "codebook_kernel", kernel)
        assert looked_up.codebook_problem.__wrapped__(PLAIN, device) == wanted


@pytest.mark.parametrize(("heads", "rows"), [(2, 1), (8, 4), (16, 8), (18, 5), (22, 6), (34, 6)])
def test_query_rows_are_divided_evenly_among_ctas_of_at_most_8(heads, rows):
    """9 rows of a KV head are 5 and 4, 17 are three times 6 at most."""
    assert looked_up.configured(query(heads), layer([(0, 9, 1)]).work).rows == rows


def test_a_configuration_follows_the_layer():
    held = layer([(2, 9, 1)], bits=4, channels=128, heads=3, dtype=torch.bfloat16)
    made = looked_up.configured(torch.zeros(1, 6, 1, 128).bfloat16(), held.work)
    block = held.work.phases[1][0].codebook.outliers.block
    assert replace(made, warps=12, resident=1) == CodebookBuild(128, 4, 2, 3, block, True, 3, 1, True, True)
    bare = layer([(0, 9, 1)], outliers=0.0, rotate=False).work
    bare.logits = Logits(3.0, torch.zeros(4).half())
    made = looked_up.configured(query(), bare)
    assert replace(made, warps=12, resident=1) == CodebookBuild(64, 3, 2, 2, 128, False, 2, 0, False, False, True, 1)


def test_the_macros_say_what_the_kernel_is_compiled_for():
    lines = replace(PLAIN, bits=4, sinks=2, softcap=True, warps=10, resident=3).macros().splitlines()
    assert lines == [
        f"#define {name} {value}"
        for name, value in {
            "D": 128, "BITS": 4, "ROWS": 4, "HEADS": 8, "BLOCK": 32, "BF16": 1, "NPHASES": 2, "PACKED": 1, "ROTATE": 1,
            "OUTLIERS": 1, "SOFTCAP": 1, "SINKS": 2, "WARPS": 10, "MINB": 3,
            "SHARED": replace(PLAIN, bits=4, warps=10).shared,
        }.items()
    ]  # fmt: skip
    plain = replace(PLAIN, bf16=False, rotate=False, outliers=False).macros()
    for name in ("BF16", "ROTATE", "OUTLIERS", "SOFTCAP", "SINKS"):
        assert f"#define {name} 0\n" in plain


def test_shared_memory_holds_tiles_of_each_warp_or_what_they_merge():
    """By hand, 128 channels: 8 steps; codes of keys or of values; 3 rows take as many sets as 4."""
    common = 8 * 1536 + 16 * 128 * 2 + 5 * 128 * 4 + 320
    own = 4 * 768 + 512 + 4 * 4 * 512 + 64
    assert replace(PLAIN, warps=2).shared == common + 2 * (16 * 3 * 128 + 512 + own)
    three = 8 * 1536 + 16 * 128 * 2 + 4 * 128 * 4 + 320 + (16 * 3 * 128 + 512 + 3 * 768 + 512 + 4 * 4 * 512 + 64)
    assert replace(PLAIN, warps=1, rows=3).shared == three
    assert replace(PLAIN, warps=1, rows=1).shared - replace(PLAIN, warps=0, rows=1).shared == (
        16 * 3 * 128 + 512 + 768 + 512 + 4 * 512 + 64
    )


def test_as_many_warps_as_fit_are_chosen():
    static = 128 * -(-(12 * 4 * 8 + 4) // 128)
    need = PLAIN.shared + static
    assert PLAIN.fits(need) and not PLAIN.fits(need - 1)
    twice = replace(PLAIN, resident=2)
    assert twice.fits(2 * (need + 1024) - 1024) and not twice.fits(2 * (need + 1024) - 1025)
    for plain, most in ((PLAIN, 8), (replace(PLAIN, rows=1), 16)):
        assert choose_warps(plain, 10**9, 64).warps == most
        found = [choose_warps(plain, shared, 64).warps for shared in (H200, 160 * 1024, 99 * 1024, 50 * 1024, 1)]
        assert found == sorted(found, reverse=True) and found[-1] == 1 and {1, 2, 4, 6, 8, 10, 12, 16} >= set(found)
        for shared in (H200, 99 * 1024):
            best = choose_warps(plain, shared, 64)
            assert best.fits(shared) and best.resident == 1
            wider = [warps for warps, _ in decode.CHOICES if best.warps < warps <= most]
            assert not any(replace(best, warps=warps).fits(shared) for warps in wider)


def test_one_query_row_has_16_warps_where_12_would_take_more_rounds():
    one = replace(PLAIN, rows=1)
    tiles = (1, 8, 12, 12.5, 16, 17, 24, 25, 62)
    assert [choose_warps(one, H200, n).warps for n in tiles] == [12, 12, 12, 16, 16, 12, 12, 16, 16]
    assert {choose_warps(PLAIN, 10**9, n).warps for n in tiles} == {8}


def test_tiles_are_divided_among_the_multiprocessors(monkeypatch):
    """3 rows of 4 KV heads with 110 tiles each are 10 for each of 132 multiprocessors; with 180 tiles, 16.4."""
    asked = []
    monkeypatch.setattr(decode, "choose_warps", lambda build, shared, tiles: asked.append((shared, tiles)) or build)
    work = layer([(0, 9, 0)] * 3, heads=4).work
    for room in (110 * 128, 180 * 128 - 5):
        work.room = room
        looked_up.configured(torch.zeros(3, 4, 1, 64).half(), work)
    assert asked == [(H200, 10.0), (H200, 3 * 4 * 180 / 132)]


def test_the_source_begins_with_the_header_and_ends_with_the_kernel(monkeypatch):
    text = codebook_build.codebook_source()
    parts = [codebook_build.codebook_source_file(name) for name in codebook_build.PARTS]
    assert text.startswith(parts[0]) and text.endswith(parts[-1]) and all(part in text for part in parts)
    loaded = []
    monkeypatch.setattr(codebook_build.nvrtc.Function, "__init__", lambda self, *given: loaded.append(given))
    for capability, overlapped in (((9, 0), True), ((8, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        made = codebook_build.codebook_kernel.__wrapped__(PLAIN, 3)
        assert made.build is PLAIN
        assert loaded.pop() == (PLAIN.macros() + text, "decode", 3, 12 * 32, PLAIN.shared, overlapped)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("sinks", [None, torch.arange(4).half(), torch.arange(4).bfloat16()])
def test_a_launch_shares_the_tokens_of_a_head_and_gets_sinks_as_it_was_compiled_for(splits, sinks, monkeypatch):
    launched, rooms, given = [], [], []
    compiled = SimpleNamespace(resident=264, launch=lambda *given: launched.append(given))
    monkeypatch.setattr(looked_up, "codebook_kernel", lambda build, device: given.append((build, device)) or compiled)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(looked_up, "workspace", lambda *asked: rooms.append(asked) or "pc")
    packed = []
    monkeypatch.setattr(looked_up, "codebook_arguments", lambda *asked: packed.append(asked) or b"packed")
    work = layer([(2, 400, 1), (0, 5, 1)]).work
    work.logits = Logits(None, sinks)
    asked = torch.zeros(2, 4, 64, 1).half().transpose(-1, -2)[..., ::1]
    out = looked_up.attend(asked, work, 0.25, (("warps", 6), ("rows", 1)), splits)
    assert out.shape == (2, 1, 4, 64) and out.dtype == torch.float16
    ((build, device),) = given
    assert (build.warps, build.rows, device) == (6, 1, 0)
    lines = 2 * 2 * 2  # rows, KV heads, and blocks of one query row
    parts = best_splits(lines, 264, work.tiles(), 6) if splits is None else splits
    assert launched == [((parts, 4, 2), b"packed", 77)]
    assert rooms == [(0, 77, lines * parts * 68, lines)]
    (arguments,) = packed
    assert arguments[1] is work and arguments[2:4] == (0.25, parts) and arguments[4] is out
    assert arguments[5:7] == ("p", "c") and arguments[0].stride(-1) == 1
    if sinks is None:
        assert arguments[7] is None
    else:
        assert torch.equal(arguments[7].float(), sinks.float())
        assert arguments[7].dtype == (torch.float16 if sinks.dtype == torch.float16 else torch.float32)
