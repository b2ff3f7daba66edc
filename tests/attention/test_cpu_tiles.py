"""The CPU kernel that unpacks tiles for many queries, with every instruction set of the machine."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.attention.cpu import build, chunk_kernel
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format, Part, Work
from kvbench.attention.reads import looked_up
from kvbench.attention.rope.rotation_tables import Rope, rotation_tables
from kvbench.attention.synthetic import dequantized_attention, relative_error
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment
from tests.attention import test_cpu_decode as decode_tests
from tests.attention.test_cpu_decode import FORMATS, TOLERANCE, made, queries

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

SETS = sorted({*decode_tests.SETS, build.instructions()})
#: formats whose codes stand for numbers of a table, and so are left to plain torch
TABLES = [name for name in FORMATS if name.startswith(("fp8", "nvfp4", "iq4_nl", "octave", "levels"))]
UNPACKED = [name for name in FORMATS if name not in TABLES]


def causal(work, row, count, window=None):
    total = sum(tokens for *_, tokens in work.counts[row])
    return chunk_kernel.causal_runs(work.counts[row], total, torch.arange(total) - (total - count), window)


def attend(query, work, instructions=None, **more):
    rows = [
        chunk_kernel.attend_phases(
            query[row : row + 1],
            slice(row, row + 1),
            work,
            causal(work, row, query.shape[2], **more),
            0.2,
            instructions,
        )
        for row in range(len(query))
    ]
    return torch.cat(rows)


def agrees(query, work, instructions=None):
    assert chunk_kernel.refuses_chunk(query, work) is None
    found = attend(query, work, instructions)
    assert found.dtype == query.dtype
    assert relative_error(found, dequantized_attention(query, work, 0.2)) < TOLERANCE[query.dtype]


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNPACKED)
def test_every_format_is_unpacked_by_every_instruction_set(name, dtype, instructions):
    window = int(name.split()[1]) if name.startswith("W") else 10
    work = made(name, [520 // window * window, 0], (37, 37))
    agrees(queries(work, 2, count=35, dtype=dtype), work, instructions)


@pytest.mark.parametrize("name", TABLES)
def test_formats_of_tables_are_refused_by_name(name):
    work = made(name, [512], (37, 37))
    assert "in codes of the kind" in str(chunk_kernel.refuses_chunk(queries(work, 1, count=35), work))


@pytest.mark.parametrize("channels", [32, 48, 80, 128, 256])
def test_heads_of_all_sizes(channels):
    work = made("groups of 16", [150], (9, 9), channels=channels)
    agrees(queries(work, 1, count=5), work)


@pytest.mark.parametrize("logits", [Logits(3.0), Logits(50.0), Logits(None, torch.tensor([4.0, -1, 2, 0.5, 9, -20]))])
def test_caps_and_sinks(logits):
    work = made("int4 G32", [300, 3], (37, 37))
    work.logits = logits
    agrees(queries(work, 2, count=20), work)


@given(
    name=st.sampled_from([name for name in UNPACKED if not name.startswith(("W", "kvarn"))]),
    packed=st.integers(0, 1400),
    keys=st.integers(1, 200),
    values=st.integers(1, 200),
    heads=st.integers(1, 3),
    group=st.integers(1, 5),
    count=st.integers(1, 150),
    channels=st.sampled_from([64, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    instructions=st.sampled_from(SETS),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_random_layers(name, packed, keys, values, heads, group, count, channels, dtype, instructions):
    packed += max(values - keys, 0)  # the values' packed segment is not negative
    work = made(name, [packed], (max(keys, count), max(values, count)), heads=heads, channels=channels)
    agrees(queries(work, 1, group=group, count=count, dtype=dtype), work, instructions)


@pytest.mark.parametrize("instructions", SETS)
def test_a_query_sees_each_token_at_its_turns_only(instructions):
    """Random turns, in runs that begin and end inside tiles, against a mask; some queries see nothing."""
    rng = torch.Generator().manual_seed(3)
    heads, group, count, total = 2, 3, 70, 400
    keys, values = (torch.randn(1, heads, total, 64, generator=rng) for _ in range(2))
    query = torch.randn(1, heads * group, count, 64, generator=rng)
    begins = torch.randint(2, count, (total,), generator=rng, dtype=torch.int32)
    ends = begins + torch.randint(0, 9, (total,), generator=rng, dtype=torch.int32)
    begins[5:130], ends[5:130] = 60, 60  # a whole tile that nobody sees, but its first tokens
    order = torch.cat([torch.arange(200, 400), torch.arange(0, 131), torch.arange(150, 200)])
    lines = [(0, 0, 200, 200, 200, 200), (0, 0, 0, 0, 131, 0), (0, 0, 150, 150, 50, 150)]
    runs = chunk_kernel.Runs(
        torch.tensor(lines, dtype=torch.int32), begins[order].contiguous(), ends[order].contiguous()
    )
    sides = [[chunk_kernel.Source(Part(Format("full", 16), buffer=x))] for x in (keys, values)]
    found = chunk_kernel.run_chunk(query, *sides, runs, (heads, 64, 64), 0.2, Logits(), instructions=instructions)
    turn = torch.arange(count, dtype=torch.int32)[:, None]
    seen = (begins <= turn) & (turn < ends)
    seen[:, 131:150] = False
    assert not seen.any(-1).all()
    scores = 0.2 * query @ keys.repeat_interleave(group, 1).transpose(-1, -2)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    wanted = (weights @ values.repeat_interleave(group, 1)).transpose(1, 2)
    assert relative_error(found, wanted) < TOLERANCE[torch.float32]
    assert not found[:, ~seen.any(-1)].any()


def test_a_sliding_window():
    work = made("int3 G32", [200], (40, 40))
    query = queries(work, 1, count=30)
    found = attend(query, work, window=100)
    for turn in (0, 17, 29):  # alone, with the tokens that it sees as all there are
        lines = [(7, 7, 0)] * len(work.counts[0])
        last, hidden = 240 - 29 + turn, 240 - 30 + turn - 99
        lines = [(hidden, hidden, 200 - hidden), (work.counts[0][1][0], work.counts[0][1][1], last - 200)]
        one = Work(work.phases, torch.tensor([lines], dtype=torch.int32), [lines], work.heads, 64, 64)
        wanted = dequantized_attention(query[:, :, turn : turn + 1], one, 0.2)
        assert relative_error(found[:, turn : turn + 1], wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("sinks", [None, torch.tensor([4.0, -1, 2, 0.5, 9, -20])])
def test_a_second_call_goes_on_with_the_sums_of_the_first(sinks):
    work, logits = made("int2 G32", [700], (40, 40)), Logits(None, sinks)
    query = queries(work, 1, count=30)
    sides = [[chunk_kernel.Source(pair[side]) for pair in work.phases] for side in (0, 1)]
    whole, state = causal(work, 0, 30), torch.empty(1, 6, 30, 66)
    exact = whole.runs[1].tolist()
    parts = [
        ([[0, 0, 0, 0, 256, 0]], slice(0, 256)),
        ([[0, 0, 256, 256, 444, 256], exact], slice(256, None)),
    ]
    for number, (lines, part) in enumerate(parts):
        runs = chunk_kernel.Runs(
            torch.tensor(lines, dtype=torch.int32), whole.begins[part].clone(), whole.ends[part].clone()
        )
        out = chunk_kernel.run_chunk(
            query, *sides, runs, (2, 64, 64), 0.2, logits, state=state, later=number > 0, finish=number == 1
        )
    work.logits = logits
    assert relative_error(out, dequantized_attention(query, work, 0.2)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("instructions", SETS)
def test_threads_change_no_bit(instructions, monkeypatch):
    work = made("int2 G32", [2300], (20, 128))
    query = queries(work, 1, count=20, dtype=torch.bfloat16)
    outs = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outs.append(attend(query, work, instructions))
    library = build.kernel_library(instructions)
    monkeypatch.setattr(build, "kernel_library", lambda *_: replace(library, parallel=None))  # threads of its own
    outs.append(attend(query, work, instructions))
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def peak_bytes():
    """The most memory of this process since :func:`forget_peak`, and what it has now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [1024 * int(lines[name].split()[0]) for name in ("VmHWM", "VmRSS")]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_many_queries_over_many_tokens_take_little_memory():
    """Partial results stand until they are merged: those of all splits and queries would take 68 MiB here."""
    tokens, count = 1 << 15, 1 << 14
    buffer = torch.zeros(1, 1, tokens, 32)
    source = [chunk_kernel.Source(Part(Format("full", 16), buffer=buffer))]
    unseen = torch.zeros(tokens, dtype=torch.int32)
    line = torch.tensor([[0, 0, 0, 0, tokens, 0]], dtype=torch.int32)
    query = torch.zeros(1, 1, count, 32)
    runs = chunk_kernel.Runs(line, unseen, unseen)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()[1]
    out = chunk_kernel.run_chunk(query, source, source, runs, (1, 32, 32), 0.2, Logits())
    assert not out.any() and peak_bytes()[0] - before < 24 << 20


def rotation(keys, positions, inverse=False):
    """RoPE of the usual kind, first half of the channels with the second half."""
    half = keys.shape[-1] // 2
    angles = positions[:, None, :, None].double() * 0.7 ** torch.arange(half)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = keys.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def looked_up_layer(bits, dtype, *, rope, outliers=0.02, lengths=(300, 300), exact=0):
    """Segments in KVQuant's format, and what they hold, dequantized and rotated."""
    rng = torch.Generator().manual_seed(bits)
    heads, channels, batch = 2, 64, len(lengths)
    thresholds = torch.stack([torch.full((128,), 1.6), torch.full((128,), -1.5)]).half()
    levels = torch.sort(torch.randn(2**bits, generator=rng))[0]
    segments = []
    for side, limits in (("key", thresholds), ("value", None)):
        form = NuqFormat(bits, levels, outliers, limits)
        segment = NuqSegment(batch, heads, channels, dtype, "cpu", form=form, side=side)
        for row, length in enumerate(lengths):
            x = torch.randn(1, heads, length, channels, generator=rng) * (1 + row)
            segment.append(slice(row, row + 1), x.to(dtype))
        segments.append(segment)
    starts = torch.tensor([5, 200][:batch], dtype=torch.int32)
    tables = Rope(starts, *rotation_tables(rotation, channels, torch.device("cpu"), 600)) if rope else None
    counts = [[(0, 0, length)] for length in lengths]
    work = Work([tuple(map(looked_up, segments))], torch.tensor(counts), counts, heads, channels, channels, rope=tables)
    tokens = []
    for row, length in enumerate(lengths):
        keys, values = (segment.read(slice(row, row + 1), 0, length, torch.float32) for segment in segments)
        tokens.append((rotation(keys, torch.arange(length)[None] + starts[row]) if rope else keys, values))
    return work, tokens


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "rope"), [(2, True), (3, False), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("count", [1, 20])
def test_codebooks_with_outliers_and_keys_before_rope(bits, rope, dtype, instructions, count):
    work, tokens = looked_up_layer(bits, dtype, rope=rope, lengths=(300, 137))
    query = queries(work, 2, count=count, dtype=dtype)
    assert chunk_kernel.refuses_chunk(query, work) is None
    found = attend(query, work, instructions)
    for row, (keys, values) in enumerate(tokens):
        length = keys.shape[2]
        scores = 0.2 * query[row].float() @ keys[0].repeat_interleave(3, 0).transpose(-1, -2)
        hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
        wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[0].repeat_interleave(3, 0)
        assert relative_error(found[row], wanted.transpose(0, 1)) < TOLERANCE[dtype]


def test_codebooks_without_outliers():
    work, tokens = looked_up_layer(4, torch.float32, rope=True, outliers=0.0, lengths=(130,))
    query = queries(work, 1)
    keys, values = (x[0].repeat_interleave(3, 0) for x in tokens[0])
    wanted = (0.2 * query[0] @ keys.transpose(-1, -2)).softmax(-1) @ values
    assert relative_error(attend(query, work)[0], wanted.transpose(0, 1)) < TOLERANCE[torch.float32]


def test_what_the_lists_do_not_name_is_refused():
    work = made("int4 G32", [300], (9, 9))
    assert chunk_kernel.refuses_chunk(queries(work, 1, dtype=torch.float64), work) == "queries in float64"
    work, _ = looked_up_layer(4, torch.float32, rope=True, lengths=(130,))
    work.key_dim = work.value_dim = 48
    assert chunk_kernel.refuses_chunk(torch.zeros(1, 6, 1, 48), work) == "keys before RoPE of 48 channels"
