"""The Triton decode kernel, run by Triton's interpreter, against attention in fp32 on the dequantized tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention import interpreter

interpreter.require()

from kvbench.attention import phases  # noqa: E402
from kvbench.attention.check_cases import windows  # noqa: E402
from kvbench.attention.logits import Logits  # noqa: E402
from kvbench.attention.phases import Format  # noqa: E402
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402
from kvbench.methods import load_method  # noqa: E402
from kvbench.methods.cocktail import ChunkPlan, Plans  # noqa: E402
from kvbench.retrieval.chunks import Chunked, Widths  # noqa: E402
from tests import zoo  # noqa: E402

TOLERANCE = 3e-3
# fewer, longer steps: the interpreter's time goes by operations
triton_decode.TABLE.update(triton_decode.changed(full_step=64))


def channel(bits, group, kind="affine"):
    return Format(kind, bits, "channel", group)


def token(bits, group, kind="affine"):
    return Format(kind, bits, "token", group)


def rows(batch, heads, count, channels, seed=0, dtype=torch.float16):
    return (torch.randn(batch, heads, count, channels, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def check(work, query):
    scaling = query.shape[-1] ** -0.5
    assert triton_decode.refuses(query, work) is None
    found = triton_decode.attend(query, work, scaling)
    assert found.dtype == query.dtype and found.shape == (*query.transpose(1, 2).shape[:3], work.value_dim)
    # the interpreter truncates to bf16 where a GPU rounds
    assert relative_error(found, dequantized_attention(query, work, scaling)) < (
        2 * TOLERANCE if query.dtype == torch.bfloat16 else TOLERANCE
    )


FORMATS = [
    # every width, group and kind of keys and of values at least once
    (channel(2, 32), token(2, 32), 128, 128),
    (channel(2, 128), token(2, 64), 64, 64),
    (channel(2, 64), token(2, 128), 64, 128),
    (channel(4, 32), token(4, 32), 128, 128),
    (channel(4, 64), token(4, 64), 128, 64),
    (channel(4, 128), token(4, 32), 64, 64),
    (channel(8, 32), token(8, 64), 64, 64),
    (channel(8, 128), token(4, 64), 64, 64),
    (channel(8, 128, "hierarchical"), token(8, 64, "hierarchical"), 64, 64),
    (token(8, 32, "hierarchical"), token(8, 32, "hierarchical"), 64, 64),
    (token(4, 64, "atom"), token(4, 64, "atom"), 64, 64),
    (token(2, 128, "atom"), token(2, 128, "atom"), 128, 128),
    (token(4, 32), token(4, 64), 128, 64),
    (token(2, 64), token(2, 64), 64, 64),
    (channel(4, 64), token(2, 64), 64, 64),  # fields of different length: no tile is walked whole
    (channel(2, 64), token(4, 64), 64, 64),
    (windows(2, 42), token(2, 64), 64, 64),  # groups that lie across the ends of tiles
    (windows(2, 85), token(2, 64), 64, 64),  # and are uneven
    (windows(4, 42), token(4, 64), 64, 64),
    (windows(2, 16), token(2, 64), 64, 64),
    (windows(8, 96), token(8, 64), 64, 64),
    (windows(4, 131), token(2, 64), 64, 64),  # fields of different length
]


@pytest.mark.parametrize(("key", "value", "key_dim", "value_dim"), FORMATS)
def test_formats_with_windows_of_different_lengths(key, value, key_dim, value_dim):
    """Keys and values both packed (a whole tile and a part of one), one of them packed, and both exact."""
    work = layer(
        [Piece(key, [256]), Piece(FULL, [5])],
        [Piece(value, [173]), Piece(FULL, [88])],
        heads=1,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    assert len(work.phases) == 3
    check(work, rows(1, 1, 1, key_dim))


@pytest.mark.parametrize(
    ("group", "count", "dtype"),
    [(1, 1, torch.bfloat16), (1, 9, torch.float16), (3, 2, torch.float16), (4, 5, torch.bfloat16)],
)
def test_rows_of_different_lengths_under_a_causal_window(group, count, dtype):
    """Query heads and tokens of a KV head are one block of rows; batch rows have tables of their own."""

    work = layer(
        [Piece(FULL, [2, 0, 2]), Piece(channel(4, 64), [256, 0, 128]), Piece(FULL, [9, 49, 80])],
        [Piece(FULL, [2, 0, 2]), Piece(token(4, 64), [192, 0, 64]), Piece(FULL, [73, 49, 144])],
        heads=1,
        key_dim=64,
        value_dim=64,
        dtype=dtype,
    )
    check(work, rows(3, group, count, 64, dtype=dtype))


@pytest.mark.parametrize("sliding", [271, 250, 150, 80, 3])
def test_a_sliding_window_begins_anywhere(sliding):
    """Inside a group and inside a tile of packed tokens, among exact values, among exact keys; rows differ."""
    work = layer(
        [Piece(FULL, [2, 0]), Piece(channel(4, 32), [256, 32]), Piece(FULL, [22, 30])],
        [Piece(FULL, [2, 0]), Piece(token(4, 64), [190, 20]), Piece(FULL, [88, 42])],
        heads=1,
        key_dim=64,
        value_dim=64,
        sliding=sliding,
    )
    assert [sum(count for *_, count in row) for row in work.counts] == [sliding, min(sliding, 62)]
    check(work, rows(2, 2, 1, 64))


@pytest.mark.parametrize(("group", "count", "dtype"), [(1, 1, torch.bfloat16), (4, 2, torch.float16)])
def test_odd_windows_in_rows_of_different_lengths(group, count, dtype):
    """One query row has a column for each group of a tile, several rows take two products; tiers begin within tiles."""
    work = layer(
        [Piece(FULL, [2, 0, 2]), Piece(windows(2, 42), [420, 42, 0]), Piece(FULL, [9, 49, 380])],
        [Piece(FULL, [2, 0, 2]), Piece(token(2, 64), [300, 0, 180]), Piece(FULL, [129, 91, 200])],
        heads=2,
        key_dim=64,
        value_dim=64,
        dtype=dtype,
    )
    check(work, rows(3, 2 * group, count, 64, dtype=dtype))


def test_values_packed_before_their_keys():
    work = layer(
        [Piece(channel(2, 32), [32]), Piece(FULL, [150])],
        [Piece(token(2, 32), [170]), Piece(FULL, [12])],
        heads=1,
        key_dim=64,
        value_dim=64,
    )
    check(work, rows(1, 2, 3, 64))


def test_a_tier_may_begin_inside_a_tile():
    """Keys and values change their formats at different slots: pairs that begin in the middle of a packed tile."""
    work = layer(
        [Piece(channel(4, 32), [300]), Piece(FULL, [30])],
        [Piece(token(4, 64), [44]), Piece(FULL, [0]), Piece(token(4, 64), [256]), Piece(FULL, [30])],
        heads=1,
        key_dim=64,
        value_dim=64,
    )
    # as if the second values began at the keys' place in their tile
    (_, second, _) = work.counts[0]
    assert second == (44, 0, 256)
    work.table[0, 1, 1] = work.counts[0][1][1]
    moved = [list(work.counts[0])]
    moved[0][1] = (44, 44, 212)
    work.counts, work.table = moved, torch.tensor(moved, dtype=torch.int32)
    check(work, rows(1, 1, 1, 64))


def test_work_is_split_by_the_table_not_by_the_host():
    """A captured launch is replayed with longer rows: the grid stays, every token is read once."""
    work = layer(
        [Piece(channel(4, 128), [640]), Piece(FULL, [33])],
        [Piece(token(4, 64), [640]), Piece(FULL, [33])],
        heads=1,
        key_dim=64,
        value_dim=64,
    )
    counts = work.counts
    work.counts = [[(0, 0, 128), (0, 0, 1)]]  # what the host believed when it chose the grid
    query = rows(1, 1, 1, 64)
    found = triton_decode.attend(query, work, 0.125)
    work.counts = counts
    assert relative_error(found, dequantized_attention(query, work, 0.125)) < TOLERANCE


@pytest.mark.parametrize("fused", [0, 16])
def test_partial_results_merged_by_the_last_program_or_a_second_kernel(fused, monkeypatch):
    work = layer([Piece(FULL, [200, 131])], [Piece(FULL, [200, 131])], heads=1, key_dim=64, value_dim=128)
    monkeypatch.setitem(triton_decode.TABLE, 16, triton_decode.Tuning(fused=fused, max_rows=8))
    query = rows(2, 3, 3, 64)
    for _ in range(2):  # counters are left zeroed
        check(work, query)


LOGITS = {
    "softcap": Logits(3.0),
    "sinks": Logits(None, torch.tensor([4.0, -20.0, 0.5, 9.0, 2.0, -1.0])),
    "both, sinks in bf16": Logits(1.5, torch.tensor([2.0, -3.0, 0.0, 1.0, 200.0, -200.0]).bfloat16()),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [*(("both, sinks in bf16", number) for number in (1, 8, 12, 14)), ("softcap", 1), ("sinks", 12)],
)
def test_capped_scores_and_sinks(name, number):
    """Whole tiles, parts of them and exact tokens; rows of different lengths, grouped heads, two tokens a step.

    Both at once in four formats; one without the other, by keys in groups of tokens and of channels.
    """
    key, value, _, _ = FORMATS[number]
    channels = 128 if 128 in (key.group, value.group) and "channel" not in (key.axis, value.axis) else 64
    work = layer(
        [Piece(key, [256, 128]), Piece(FULL, [5, 60])],
        [Piece(value, [173, 128]), Piece(FULL, [88, 60])],
        heads=2,
        key_dim=channels,
        value_dim=channels,
    )
    query = rows(2, 6, 2, channels)
    plain = dequantized_attention(query, work, channels**-0.5)
    work.logits = LOGITS[name]
    check(work, query)
    assert relative_error(plain, dequantized_attention(query, work, channels**-0.5)) > 0.05


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("fused", [0, 16])
def test_a_sink_is_counted_once_however_the_work_is_shared(fused, parts, name, monkeypatch):
    """One program, the last program of a few, a second kernel; more blocks of query rows than one."""
    work = layer([Piece(FULL, [100 * parts])], [Piece(FULL, [100 * parts])], heads=2, key_dim=64, value_dim=128)
    work.logits = LOGITS[name]
    monkeypatch.setitem(triton_decode.TABLE, 16, triton_decode.Tuning(fused=fused, max_rows=8))
    check(work, rows(1, 6, 3, 64))
    assert work.tiles() == parts


def plan():
    """Chunks of a Cocktail prompt: four of two bits, one of four, one exact."""
    widths = Widths((2, 2, 4, 2, 16, 2), None, None)
    return ChunkPlan(Chunked(0, 32, tuple("abcdef"), "", "input"), widths)


METHODS = {
    "kivi": ("kivi", {"quantizer": "int4"}),
    "kivi, sinks": ("kivi", {"quantizer": "int4", "residual": 64, "sinks": 3}),
    "logquant": ("logquant", {"quantizer": "int2_g64", "window": 64}),
    "partial_logquant": ("partial_logquant", {"window": 64}),
    "atom": ("atom", {}),
    "cocktail": ("cocktail", {}),
    "quantspec": ("quantspec", {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_layers_of_methods(name):
    """Real stores after a prompt and some steps, rows of different lengths, two tokens in the last step."""
    base, choices = METHODS[name]
    channels = 128 if base == "quantspec" else 64
    method, heads = load_method(base, **choices), 1
    prompt, padding, batch = 203, [0, 45], 2
    if base == "cocktail":
        padding, batch = None, 1
    elif base == "quantspec":
        prompt, padding, batch = 390, None, 1
    held = zoo.new_layer(method, padding)
    held.progress.method_state = Plans([plan()]) if base == "cocktail" else None
    keys, values = (x.half() for x in zoo.random_kv(prompt + 5, batch, heads, channels))
    for first, last in ((0, prompt), (prompt, prompt + 3), (prompt + 3, prompt + 5)):
        zoo.feed(held, keys[:, :, first:last], values[:, :, first:last])
    work = phases.work(held)
    assert {form.kind for pair in work.signature() for form in pair} > {"full"}
    query = rows(batch, 2, 2, channels)
    scaling = channels**-0.5
    found = triton_decode.attend(query, work, scaling)
    for row in range(batch):
        one = slice(row, row + 1)
        k, v = (
            torch.cat(
                [segment.read(one, 0, segment.lengths[row], torch.float32) for segment in store.segments], 2
            ).repeat_interleave(2, 1)
            for store in held.stores()
        )
        assert k.shape[2] == prompt + 5 - (padding or [0])[row]
        scores = query[one].float() @ k.transpose(-1, -2) * scaling
        scores[:, :, 0, -1] = -math.inf
        assert relative_error(found[one].transpose(1, 2), scores.softmax(-1) @ v) < TOLERANCE


def test_draft_view_of_quantspec_reads_the_upper_nibbles_alone():
    method = load_method("quantspec")
    held = zoo.new_layer(method)
    keys, values = (x.half() for x in zoo.random_kv(400, 1, 1, 128))
    zoo.feed(held, keys, values)
    zoo.feed(held, keys[:, :, :1], values[:, :, :1])
    draft = phases.work(held, upper=True)
    assert draft.signature()[0][0] == Format("affine", 4, "channel", 128)
    query = rows(1, 1, 1, 128)
    check(draft, query)
    assert (
        relative_error(triton_decode.attend(query, phases.work(held), 0.1), dequantized_attention(query, draft, 0.1))
        > TOLERANCE
    )


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from([(channel(4, 32), token(4, 32)), (channel(2, 64), token(2, 64)), (token(4, 64), token(4, 32))]),
    st.lists(st.integers(0, 200), min_size=1, max_size=2),
    st.integers(1, 9),
    st.integers(1, 4),
    st.data(),
)
def test_any_shape(forms, packed, count, group, data):
    fewer = [data.draw(st.integers(0, n)) for n in packed]
    newest = count + data.draw(st.integers(0, 40))
    work = layer(
        [Piece(forms[0], packed), Piece(FULL, [newest] * len(packed))],
        [Piece(forms[1], fewer), Piece(FULL, [n - m + newest for n, m in zip(packed, fewer, strict=True)])],
        heads=1,
        key_dim=64,
        value_dim=64,
    )
    check(work, rows(len(packed), group, count, 64))


@pytest.mark.parametrize(
    ("key", "value", "dim", "heads", "dtype", "reason"),
    [
        (channel(4, 64), token(4, 64), 64, 1, torch.half, None),
        (channel(4, 64), token(4, 32), 96, 1, torch.half, "heads of 96 channels"),
        (channel(4, 64), channel(4, 64), 64, 1, torch.half, "values in groups per channel"),
        (channel(4, 64), token(4, 64), 64, 1, torch.float32, "queries in float32"),
        (channel(4, 64), token(4, 64), 64, 200, torch.half, "200 query heads a KV head x 1 tokens"),
    ],
)
def test_refusals_say_what_is_not_served(key, value, dim, heads, dtype, reason):
    pieces = [Piece(key, [128]), Piece(FULL, [1])], [Piece(value, [128]), Piece(FULL, [1])]
    work = layer(*pieces, heads=1, key_dim=dim, value_dim=dim)
    assert triton_decode.refuses(rows(1, heads, 1, dim, dtype=dtype), work) == reason
