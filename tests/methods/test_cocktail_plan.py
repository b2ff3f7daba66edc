"""Cocktail's plans: what a sliding window leaves of chunks, runs in place and their segments, and groups that fit."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.cocktail_plan import ChunkPlan, Plans, Run, aligned
from kvbench.retrieval.chunks import Chunked, Widths
from tests.zoo import feed, new_layer, random_kv

CPU = torch.device("cpu")


def planned(bits: list[int], size: int = 4, first: int = 3, last_layer: int | None = None) -> ChunkPlan:
    chunks = Chunked(first, size, ("",) * len(bits), "", "input")
    return ChunkPlan(chunks, Widths(tuple(bits), None, None), last_layer)


PLAN = planned([2, 4, 2, 16, 4])  # chunks begin at 3, 7, 11, 15 and 19, and end at 23


def test_tokens_of_one_width_are_in_the_order_of_the_text() -> None:
    assert PLAN.tokens(2) == [*range(3, 7), *range(11, 15)] and PLAN.tokens(16) == [*range(15, 19)]
    assert PLAN.tokens(4) == [*range(7, 11), *range(19, 23)] and PLAN.tokens(8) == []


@pytest.mark.parametrize(
    ("hidden", "two", "four", "exact"),
    [
        (0, [3, 4, 5, 6, 11, 12, 13, 14], [7, 8, 9, 10, 19, 20, 21, 22], [0, 1, 2, 15, 16, 17, 18, 23, 24]),
        (2, [3, 4, 5, 6, 11, 12, 13, 14], [7, 8, 9, 10, 19, 20, 21, 22], [2, 15, 16, 17, 18, 23, 24]),
        (6, [3, 4, 5, 6, 11, 12, 13, 14], [7, 8, 9, 10, 19, 20, 21, 22], [15, 16, 17, 18, 23, 24]),
        (7, [11, 12, 13, 14], [7, 8, 9, 10, 19, 20, 21, 22], [15, 16, 17, 18, 23, 24]),
        (17, [], [19, 20, 21, 22], [17, 18, 23, 24]),
        (24, [], [], [24]),
    ],
)
def test_packed_chunks_stay_until_all_of_their_tokens_are_hidden(hidden, two, four, exact) -> None:
    plan = planned([2, 4, 2, 16, 4])
    assert plan.order(25, hidden) == (two, four, exact) == plan.order(25, hidden)
    for part, wanted in zip(plan.indices(25, CPU, hidden), (two, four, exact), strict=True):
        assert part.dtype == torch.int32 and part.tolist() == wanted and not part.is_inference()


def test_indices_are_freed_after_the_last_layer_alone() -> None:
    plan = planned([2, 4], last_layer=3)
    first = plan.indices(20, CPU)
    plan.placed(2)
    assert plan.indices(20, CPU) is first
    plan.placed(3)
    assert plan.indices(20, CPU) is not first
    kept = planned([2, 4])
    first = kept.indices(20, CPU)
    kept.placed(3)
    assert kept.indices(20, CPU) is first


@pytest.mark.parametrize(
    ("hidden", "passed"), [(0, 0), (3, 3), (4, 3), (6, 3), (7, 7), (10, 7), (15, 15), (17, 17), (20, 19), (24, 24)]
)
def test_tokens_pass_up_to_the_beginning_of_a_packed_chunk(hidden, passed) -> None:
    assert PLAN.passed(hidden) == passed


@pytest.mark.parametrize(
    ("hidden", "runs"),
    [
        (0, [(16, 0, 3), (2, 3, 7), (4, 7, 11), (2, 11, 15), (16, 15, 19), (4, 19, 23), (16, 23, 25)]),
        (5, [(2, 3, 7), (4, 7, 11), (2, 11, 15), (16, 15, 19), (4, 19, 23), (16, 23, 25)]),
        (9, [(4, 7, 11), (2, 11, 15), (16, 15, 19), (4, 19, 23), (16, 23, 25)]),
        (16, [(16, 16, 19), (4, 19, 23), (16, 23, 25)]),
        (24, [(16, 24, 25)]),
    ],
)
def test_a_prompt_is_divided_into_runs_of_one_width(hidden, runs) -> None:
    assert PLAN.runs(25, hidden) == [Run(*run) for run in runs]


def test_neighbouring_chunks_of_one_width_are_one_run() -> None:
    plan = planned([4, 4, 2, 16, 16, 2, 2], first=0)
    assert plan.runs(28) == [Run(4, 0, 8), Run(2, 8, 12), Run(16, 12, 20), Run(2, 20, 28), Run(16, 28, 28)]
    assert planned([]).runs(5) == [Run(16, 0, 5)]


def test_runs_of_a_batch_share_segments_of_their_width() -> None:
    rows = [planned(bits, first=0).runs(30) for bits in ([2, 4, 4], [4, 2], [4, 16, 2])]
    segments, numbers = aligned(rows)
    # 4 bits come first in two rows; then 2 bits in two rows, and so on
    assert segments == [(4, 4), (2, 4), (4, 8), (16, 4), (2, 4)]
    assert numbers == [[1, 2], [0, 1], [0, 3, 4]]
    for of_row, mine in zip(rows, numbers, strict=True):
        assert mine == sorted(mine) and [segments[number][0] for number in mine] == [run.bits for run in of_row[:-1]]
    assert aligned([planned([]).runs(5)]) == ([], [[]])


def test_plans_follow_their_rows() -> None:
    plans = [planned([2]), planned([4]), planned([16])]
    state = Plans(list(plans))
    twin = state.clone()
    twin.select([2, 0, 0])
    assert twin.rows == [plans[2], plans[0], plans[0]] and state.rows == plans


@pytest.mark.parametrize("reorder", [True, False])
def test_a_sliding_window_drops_whole_chunks_and_tokens_32_at_a_time(reorder) -> None:
    """What is left are the visible tokens and whole packed chunks; each slot still holds the token of its place."""
    method = load_method("cocktail", encoder="bm25", chunk_size=16, group_size=16, reorder=reorder)
    plan = planned([2, 4, 16, 4, 2, 16, 4], size=16, first=5)
    keys, values = random_kv(200, channels=64, seed=6)
    layer, row = new_layer(method), slice(0, 1)
    layer.window = 80
    layer.progress.method_state = Plans([plan])
    feed(layer, keys[:, :, :130], values[:, :, :130])
    for at in range(130, 200):
        feed(layer, keys[:, :, at : at + 1], values[:, :, at : at + 1])
        layer.settle()
        seen = at + 1
        hidden = (seen - 79) // 32 * 32
        packed = [range(*span) for span, bits in zip(plan.chunks.spans, plan.widths.bits, strict=True) if bits < 16]
        if reorder:
            inside = {token for chunk in packed for token in chunk}
            wanted = {token for token in range(hidden, seen) if token not in inside}
            wanted |= {token for chunk in packed if chunk.stop > hidden for token in chunk}
        else:
            wanted = set(range(plan.passed(hidden), seen))
        places = layer.positions(0)
        places = torch.arange(seen - layer.length(row), seen) if places is None else places
        assert sorted(places.tolist()) == sorted(wanted)
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            read = torch.cat([s.read(row, 0, s.length(row), torch.float32) for s in store.segments], 2)
            tail = store.tail.length(row)
            assert torch.equal(read[:, :, -tail:], x[:, :, places[-tail:]])
            assert float((read - x[:, :, places]).abs().mean()) < 0.5


SHAPE = {"layers": 1, "query_heads": 2, "heads": 2, "channels": 64, "width": 2}


def test_bytes_of_chunks_by_hand() -> None:
    """Of 12 chunks of 16 tokens, 3 have 2 bits and 4 have 4; groups of 16 keys and of 64 channels."""
    method = load_method("cocktail", chunk_size=16)
    found = kv_bytes(method, 210, prompt=200, chunks=(3, 4), **SHAPE)
    tokens = 3 * 16, 4 * 16
    assert found.codes == 2 * 2 * 64 * (tokens[0] * 2 + tokens[1] * 4) // 8
    params = sum(count // 16 * 64 + count for count in tokens)
    assert found.scales == 2 * 2 * params * 2
    assert found.window == 2 * 2 * 64 * 2 * (210 - sum(tokens))
    by_token = kv_bytes(
        load_method("cocktail", chunk_size=16, key_axis="token"), 210, prompt=200, chunks=(3, 4), **SHAPE
    )
    assert by_token.scales == 2 * 2 * 2 * sum(tokens) * 2
    with pytest.raises(ConfigError, match="contain more tokens than the sequence"):
        kv_bytes(method, 100, prompt=100, chunks=(3, 4), **SHAPE)
    assert kv_bytes(method, 112, prompt=112, chunks=(3, 4), **SHAPE).window == 0


def test_shares_are_those_of_whole_chunks_of_the_prompt() -> None:
    method = load_method("cocktail", chunk_size=16, split=(1, 1, 2))
    assert kv_bytes(method, 210, prompt=140, **SHAPE) == kv_bytes(method, 210, prompt=140, chunks=(4, 2), **SHAPE)
    with pytest.raises(ConfigError, match=r"method\.split: must be set to predict bytes"):
        kv_bytes(load_method("cocktail", chunk_size=16), 210, prompt=140, **SHAPE)


@pytest.mark.parametrize(
    ("channels", "size", "group", "fitted"),
    [
        (32, None, 32, {}),
        (64, None, 64, {}),
        (128, None, 64, {}),
        (80, None, 16, {"method.value_group_size": 16}),
        (96, None, 32, {"method.value_group_size": 32}),
        (80, 20, 20, {}),
    ],
)
def test_groups_of_values_fit_the_head(channels, size, group, fitted) -> None:
    method = load_method("cocktail", value_group_size=size)
    assert method.value_group(channels) == group and method.fitted(channels) == fitted
    method.check(channels)
    quantizer = method.make_quantizer("value", 4, channels)
    assert (quantizer.bits, quantizer.group_size, quantizer.axis) == (4, group, "token")


@pytest.mark.parametrize(("chunk", "size", "group"), [(32, None, 32), (16, None, 16), (64, None, 32), (64, 64, 64)])
def test_groups_of_keys_divide_a_chunk(chunk, size, group) -> None:
    method = load_method("cocktail", chunk_size=chunk, group_size=size)
    assert method.key_group == group
    quantizer = method.make_quantizer("key", 2, 128)
    assert (quantizer.bits, quantizer.group_size, quantizer.axis) == (2, group, "channel")
    by_token = load_method("cocktail", chunk_size=chunk, key_axis="token").make_quantizer("key", 2, 128)
    assert (by_token.group_size, by_token.axis) == (64, "token")


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.0, "beta": 0.0},
        {"alpha": 0.0, "beta": 0.99},
        {"alpha": 0.99, "beta": 0.0},
        {"chunk_size": 1},
        {"split": (0.0, 0.0, 1.0)},
        {"value_group_size": 1},
        {"key_axis": "token", "group_size": 7},
    ],
    ids=str,
)
def test_settings_at_their_limits_are_taken(options) -> None:
    load_method("cocktail", encoder="bm25", **options).check(64)


def test_nothing_is_hidden_unless_a_window_says_so() -> None:
    plan = planned([2, 4, 16], first=0)
    assert plan.order(14) == plan.order(14, 0) == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13])
    assert planned([16]).order(8) == ([], [], list(range(8))) and planned([16]).runs(8) == [Run(16, 0, 8)]
    assert [part.tolist() for part in planned([16]).indices(8, CPU)] == [[], [], list(range(8))]
