"""Random layers for the check of kernels: shapes, ranges, and that they are read as the quantizers read them."""

from __future__ import annotations

import pytest
import torch

from kvbench.attention import synthetic
from kvbench.attention.check_cases import ENGINES, INT4, INT8, Case, correctness, timed
from kvbench.attention.logits import Logits
from kvbench.attention.reads import describe_part
from kvbench.attention.synthetic import FULL, Piece, elements, groups_of, layer, random_part, read_tokens
from kvbench.attention.work import Format
from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.turboquant import LevelQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

HALF = torch.float16


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("quantizer", "side", "tokens"),
    [
        (AffineQuantizer(4, 32, "channel"), "key", 160),
        (AffineQuantizer(8, 64, "token"), "value", 131),
        (AffineQuantizer(3, 32, "token"), "key", 131),
        (AtomQuantizer(4, 64, "token"), "key", 131),
        (HierarchicalQuantizer(32, "channel"), "key", 160),
        (WindowedQuantizer(2, 42, 64), "key", 168),
        (LevelQuantizer(4), "key", 131),
        (LevelQuantizer(3, "read"), "key", 131),
    ],
    ids=str,
)
def test_a_layer_is_read_as_its_quantizer_reads_it(quantizer, side, tokens):
    held = PackedSegment(2, 2, 64, HALF, "cpu", quantizer=quantizer, side=side)
    held.append(slice(None), torch.randn(2, 2, tokens, 64, generator=generator()).half())
    for row, heads, first, count in ((0, slice(None), 0, tokens), (1, slice(1, 2), 45, 80)):
        found = read_tokens(describe_part(held, 64), side, row, heads, first, count, 64)
        wanted = held.read(slice(row, row + 1), first, first + count, torch.float32)[0, heads]
        assert found.shape == wanted.shape and found.dtype == torch.float32
        assert float((found - wanted).abs().max()) <= 2e-3 * float(wanted.abs().max())


def test_exact_tokens_begin_at_the_number_of_their_row_among_nans():
    made = random_part(Piece(FULL, [3, 5], scale=4.0, room=2), "key", 2, 64, HALF, generator())
    assert made.buffer.shape == (2, 2, 5 + 2 + 2 + 3, 64) and made.buffer.dtype == HALF
    for row, count in enumerate((3, 5)):
        there = torch.zeros(12, dtype=torch.bool)
        there[row : row + count] = True
        assert torch.equal(~made.buffer[row, 0, :, 0].isnan(), there)
    assert 3.5 < float(made.buffer.nan_to_num().float()[made.buffer.isfinite()].std()) < 4.5


@pytest.mark.parametrize(
    ("form", "tile", "shapes"),
    [
        (Format("affine", 4, "channel", 32), 128, [(2, 2, 8, 64)] * 2),
        (Format("affine", 4, "token", 32), 128, [(2, 2, 256, 2)] * 2),
        (Format("affine", 2, "channel", 42, 42), 128, [(2, 2, 2 + 255 // 42, 64)] * 2),
        (Format("cross", 4, "channel", 128), 128, [(2, 2, 2, 64), (2, 2, 2, 64), (2, 2, 256, 1)]),
        (Format("cross", 4, "token", 64), 64, [(2, 2, 256, 1), (2, 2, 256, 1), (2, 2, 4, 64)]),
        (Format("levels", 4, "token", 64), 128, [(2, 2, 256, 1)]),
        (Format("offset", 8, "token", 32), 128, [(2, 2, 256, 2)]),
        (Format("float", 8, "token", 64, 0, ""), 128, []),
    ],
)
def test_packed_tokens_fill_whole_tiles_and_every_group_has_its_parameters(form, tile, shapes):
    made = random_part(Piece(form, [5, 120], room=10, tile=tile), "key", 2, 64, HALF, generator())
    assert [tuple(param.shape) for param in made.params] == shapes
    bits = sum(words.numel() * 16 for words in made.words)
    assert bits == 2 * 2 * 256 * 64 * form.bits and {words.dtype for words in made.words} == {torch.int16}
    assert made.factor == (0.75 if form.kind == "float" else 1.0)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "form",
    [
        *(Format("affine", bits, "token", 64) for bits in (2, 4, 8)),
        Format("atom", 4, "token", 64),
        Format("hierarchical", 8, "token", 64),
        Format("offset", 8, "token", 64, 0, "fp32"),
        Format("folded", 4, "token", 64, 0, "fp32"),
    ],
)
def test_dequantized_elements_spread_about_as_exact_ones(form, scale):
    """Uniform codes spread by 4 / sqrt(12) = 1.15 steps or more: by 1.5 with 2 bits, and more with random zeros."""
    made = random_part(Piece(form, [256], scale), "key", 1, 64, HALF, generator())
    values = read_tokens(made, "key", 0, slice(None), 0, 256, 64)
    assert bool(values.isfinite().all())
    assert 1.0 < float(values.std()) / scale < (2.2 if form.kind in ("folded", "atom") else 1.7)
    if form.kind in ("affine", "hierarchical"):
        assert abs(float(values.mean())) < 0.3 * scale


@pytest.mark.parametrize("name", ENGINES)
def test_no_element_of_an_engines_format_is_not_finite(name):
    made = random_part(Piece(ENGINES[name], [256]), "value", 1, 128, HALF, generator())
    values = read_tokens(made, "value", 0, slice(None), 0, 256, 128)
    assert bool(values.isfinite().all()) and float(values.std()) > 0.1
    assert float(values.abs().max()) <= 9.0  # steps up to 1.5 * 4 / levels; nvfp4: scales up to 2, elements up to 6
    if not ENGINES[name].scale:
        assert float(values.abs().max()) < 2 * 0.75


def test_elements_are_the_numbers_that_codes_stand_for():
    codes = torch.arange(16)
    halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert elements(Format("float", 4, "token", 16), codes).tolist() == halves + [-x for x in halves]
    assert elements(Format("offset", 4, "token", 32), codes).tolist() == list(range(-8, 8))
    assert elements(Format("offset", 8, "token", 32), torch.tensor([0, 128, 255])).tolist() == [-128, 0, 127]
    found = elements(Format("float", 8, "token", 64), torch.tensor([0x38, 0xB8, 0x7E]))
    assert found.tolist() == [1.0, -1.0, 448.0]


def test_groups_of_a_window_are_as_equal_as_can_be():
    assert groups_of(Format("affine", 4, "channel", 32), torch.tensor([0, 31, 32, 95])).tolist() == [0, 0, 1, 2]
    found = groups_of(Format("affine", 2, "channel", 3, 7), torch.arange(14)).tolist()
    assert found == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("sliding", [None, 20])
def test_attention_of_exact_tokens_is_a_softmax_over_those_that_are_seen(sliding):
    work = layer([Piece(FULL, [30, 9])], [Piece(FULL, [30, 9])], heads=2, key_dim=64, value_dim=32, sliding=sliding)
    assert (work.heads, work.key_dim, work.value_dim) == (2, 64, 32)
    hidden = 10 if sliding else 0
    assert work.counts == [[(hidden, hidden, 30 - hidden)], [(1, 1, 9)]] and work.table.tolist()[1] == [[1, 1, 9]]
    work.logits = Logits(2.0, torch.tensor([0.5, -1.0, 2.0, 0.0]))
    query = torch.randn(2, 4, 3, 64, generator=generator())
    out = synthetic.dequantized_attention(query, work, 0.3)
    assert out.shape == (2, 3, 4, 32)
    (key, value) = (side.buffer.float() for side in work.phases[0])
    for row, (first, _, count) in enumerate(line[0] for line in work.counts):
        k, v = (x[row, :, first : first + count].repeat_interleave(2, 0) for x in (key, value))
        scores = torch.tanh(query[row] @ k.transpose(-1, -2) * 0.3 / 2) * 2
        scores = scores.masked_fill(torch.ones(3, count).triu(count - 2).bool(), -torch.inf)
        scores = torch.cat([scores, work.logits.sinks.view(4, 1, 1).expand(-1, 3, 1)], -1).softmax(-1)[..., :-1]
        torch.testing.assert_close(out[row], (scores @ v).transpose(0, 1))
    assert torch.equal(synthetic.dequantized_attention(query, work, 0.3, slice(1, 2)), out[:, :, 2:])


def test_an_error_is_relative_and_infinite_if_anything_is_not_finite():
    assert synthetic.relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(1 / 5)
    assert synthetic.relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert synthetic.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_cases_of_correctness_have_two_rows_of_a_few_tiles_and_windows_that_end_within_one():
    found = {case.name: case for case in correctness()}
    assert len(found) == len(correctness())
    assert found["right int4 G64"] == Case(
        "right int4 G64", "7b", ((Format("affine", 4, "channel", 64), Format("affine", 4, "token", 64), 1.0),),
        (1491, 1024), (37, 128),
    )  # fmt: skip
    for case in found.values():
        assert case.context in ((1491, 1024), (1491, 700)) and case.window in ((37, 128), (37, 90), (37, 37))
        assert case.queries in (1, 5, 9) and not case.timed
    assert {case.queries for case in found.values() if "q9" in case.name} == {9}
    assert {case.queries for case in found.values() if "q5" in case.name} == {5}
    assert {case.dtype for case in found.values() if "bf16" in case.name} == {torch.bfloat16}


def test_timed_cases_have_the_rows_and_the_context_of_their_names():
    """9 tokens more than whole tiles, so that a kernel ends within one."""
    for case in timed():
        _, rows, length = (part for part in case.name.removesuffix(f" q{case.queries}").rsplit(" ", 2))
        assert case.context == (int(length[:-1]) * 1024 + 9,) * int(rows[1:]) and case.timed
    found = {case.name: case for case in timed()}
    assert found["int4 7b B8 32k"].tiers == INT4 and found["int8 8b B1 128k q5"].tiers == INT8
    assert found["kivi window 7b B1 4k"].window == (37, 128) and found["logquant W64 7b B1 128k"].window == (150, 150)
    assert found["logquant W42 7b B1 32k"].window == (100, 100)
    assert found["int8 7b B1 32k q5"].queries == 5 and found["int8 7b B1 32k q1"].queries == 1
