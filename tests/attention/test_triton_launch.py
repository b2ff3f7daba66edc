"""The host's part of the Triton kernel: what it refuses, how it launches, and how it shares the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention.check_cases import windows  # noqa: E402
from kvbench.attention.phases import Format, Part, Work  # noqa: E402
from kvbench.attention.synthetic import FULL  # noqa: E402
from kvbench.attention.triton import codes as triton_codes  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402
from kvbench.attention.triton.decode import Tuning, costs, tuning  # noqa: E402


def channel(bits, group, kind="affine"):
    return Format(kind, bits, "channel", group)


def token(bits, group, kind="affine"):
    return Format(kind, bits, "token", group)


def work(key, value, key_dim=64, value_dim=64, heads=1):
    phases = [(Part(key), Part(value)), (Part(FULL), Part(FULL))]
    return Work(phases, torch.zeros(1, 2, 3), [[(0, 0, 128), (0, 0, 1)]], heads, key_dim, value_dim)


def query(heads=1, count=1, rows=1, channels=64):
    return torch.zeros(1, 1, 1, channels, dtype=torch.half).expand(rows, heads, count, channels)


@pytest.mark.parametrize(
    ("asked", "described", "reason"),
    [
        (query(), work(channel(4, 64), token(4, 64)), None),
        (query(), work(token(2, 32), token(4, 32), value_dim=128), None),
        (query(), work(FULL, FULL), None),
        (query(), work(channel(4, 64), token(4, 64), value_dim=96), "heads of 96 channels"),
        (query(), work(channel(4, 64), token(4, 64), key_dim=80, value_dim=96), "heads of 80 channels"),
        (query(16, 8), work(channel(4, 64), token(4, 64)), None),
        (query(43, 3), work(channel(4, 64), token(4, 64)), "43 query heads a KV head x 3 tokens"),
        (query(32, 5), work(channel(4, 64), token(4, 64), heads=8), None),
        (query(5, 1, 13107), work(channel(4, 64), token(4, 64), heads=5), None),  # 65535 in all
        (query(4, 1, 16384), work(channel(4, 64), token(4, 64), heads=4), "16384 rows of 4 heads, more than 65535"),
        (query(), work(token(4, 128), token(4, 64)), "keys in groups of 128 channels"),
        (query(), work(channel(4, 128), token(4, 128)), "values in groups of 128 channels"),
        (query(), work(channel(4, 128), channel(4, 64)), "values in groups per channel"),
    ],
)
def test_what_it_cannot_serve_it_says(asked, described, reason):
    found = triton_decode.refuses(asked, described)
    assert found == reason if reason is None else found.startswith(reason)


def test_without_the_interpreter_tensors_of_a_cpu_are_refused(monkeypatch):
    monkeypatch.setattr(triton_decode, "INTERPRETED", False)
    assert triton_decode.refuses(query(), work(FULL, FULL)) == "tensors on cpu"


@pytest.mark.parametrize(
    ("steps", "programs", "at_once", "parts"),
    [
        (1, 1, 100, 1),
        (3, 1, 100, 3),  # no more parts than tiles
        (8, 1, 4, 4),  # one wave of 4 costs 4; two waves of one tile each cost 6
        (100, 1, 8, 8),
        (100, 300, 264, 5),  # 6 waves of 20 tiles cost 132; 5 waves 135, 7 waves 133
        (100, 5000, 10, 1),  # more programs than eight waves hold
        (2, 132, 264, 2),
        (4, 5, 4, 1),  # two waves of four tiles cost as much as three of two: the fewer parts
    ],
)
def test_parts_fill_whole_waves_of_programs(steps, programs, at_once, parts):
    """A program costs its tiles and two more, to begin."""
    assert triton_decode.choose_split(steps, programs, at_once) == parts


@pytest.mark.parametrize(
    ("registers", "shared", "resident", "wanted"),
    [
        (100, 30000, 0, 132 * 7),  # shared memory: 228 KiB / (30000 + 1 KiB)
        (100, 1000, 0, 132 * 9),  # registers: 65536 / (104 x 32 x 2)
        (8, 0, 0, 132 * 32),  # blocks of a multiprocessor
        (100, 300000, 0, 132),  # one at least
        (100, 30000, 3, 132 * 3),
    ],
)
def test_programs_at_once_are_what_registers_and_shared_memory_hold(registers, shared, resident, wanted, monkeypatch):
    about = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    kernel = SimpleNamespace(
        _init_handles=lambda: setattr(kernel, "n_regs", registers), metadata=SimpleNamespace(shared=shared)
    )
    assert triton_decode.concurrent_programs(kernel, torch.device("cuda"), Tuning(resident=resident), 2) == wanted


def test_the_narrowest_codes_choose_how_to_launch():
    table, wide = triton_decode.TABLE, triton_decode.WINDOWS
    assert tuning([(FULL, FULL)]) is table[16] and tuning([]) is table[16]
    assert tuning([(channel(4, 64), token(2, 64)), (FULL, FULL)]) is table[2]
    assert tuning([(channel(8, 64), FULL)]) is table[8] and tuning([(FULL, token(4, 64))]) is table[4]
    assert tuning([(windows(4, 42), token(8, 64)), (FULL, FULL)]) is wide[4]
    assert (wide[2].stages, wide[2].part_stages, wide[2].warps) == (2, 2, 1)
    made = Tuning(warps=3, wide_warps=5)
    assert [made.warps_for(*given) for given in ((9, 128), (9, 64), (8, 64), (8, 65), (1, 128))] == [5, 5, 1, 3, 3]


def test_a_variant_is_tried_for_all_widths_and_changes_nothing_else():
    before = dict(triton_decode.TABLE)
    found = triton_decode.changed(warps=7)
    assert found.keys() == before.keys() and {line.warps for line in found.values()} == {7}
    assert {bits: line.stages for bits, line in found.items()} == {bits: line.stages for bits, line in before.items()}
    assert before == triton_decode.TABLE


@pytest.mark.parametrize(
    ("key", "value", "part", "wanted"),
    [
        (channel(4, 128), token(4, 128), 32, (64, 24)),  # 4 + 4 a token; parts are half as dear again
        (FULL, FULL, 32, (256, 64)),
        (FULL, token(4, 128), 32, (160, 60)),
        (channel(2, 32), token(2, 64), 16, (56, 11)),  # 3 x 1.25 + 3 x 1.1
        (windows(2, 42), token(8, 128), 16, (112, 21)),  # 3 x 2 + 8
    ],
)
def test_costs_follow_the_bytes(key, value, part, wanted):
    assert costs(key, value, part) == wanted


def test_a_kernel_is_compiled_with_formats_and_costs_by_phase():
    forms = ((channel(4, 128), token(4, 128)), (channel(4, 128), token(2, 128)), (channel(4, 128), FULL), (FULL, FULL))
    (keys, values), (whole, parts) = triton_decode.compiled_for(forms, 64)
    four, two, full = (
        triton_codes.format_number("affine", 4, "token", 128),
        triton_codes.format_number("affine", 2, "token", 128),
        triton_codes.format_number("full", 16),
    )
    of_channels = triton_codes.format_number("affine", 4, "channel", 128)
    assert keys == (of_channels, of_channels, of_channels, full) and values == (four, two, full, full)
    # a part is a field of the narrower codes: 32 tokens of 4 bits, 16 of 2; exact tokens come as many as asked for
    assert whole == (64, 56, 160, 256) and parts == (24, 10, 60, 128)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (channel(2, 32), (1, 0, 2, 32, 0)),
        (token(4, 128, "atom"), (2, 1, 4, 128, 0)),
        (token(8, 64, "hierarchical"), (3, 1, 8, 64, 0)),
        (windows(4, 131), (1, 0, 4, 44, 131)),
        (Format("affine", 2, "channel", 255, 2047), (1, 0, 2, 255, 2047)),
        (FULL, (0, 0, 16, 0, 0)),
    ],
)
def test_a_format_is_a_number_and_back(form, wanted):
    number = triton_codes.format_number(form.kind, form.bits, form.axis, form.group, form.window)
    fields = ("kind", "axis", "bits", "group", "window")
    assert tuple(getattr(triton_codes, name).fn(number) for name in fields) == wanted


def test_programs_meet_in_buffers_that_hold_all_partial_results():
    device = torch.device("cpu")
    stats, sums, counters = triton_decode.scratch(device, 6, 8, 64, 3)
    assert (stats.numel(), sums.numel()) == (6 * 2 * 8, 6 * 8 * 64)
    assert stats.dtype == sums.dtype == torch.float32 and counters.dtype == torch.int32
    assert counters.tolist() == [0] * 4 and triton_decode.scratch(device, 1, 8, 64, 4)[2] is counters
