"""Points of time and memory, compared with those of fp16.

Compression, speed-up and the bound on it, computed by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.results.points import (
    allocated_compression,
    cache_bound,
    headline,
    nominal_compression,
    same_work_ratio,
    summarize_points,
)


def row(batch: int, rate: float | None, status: str = "ok", length: int = 512) -> dict[str, Any]:
    point: dict[str, Any] = {"status": status, "tokens_per_s": rate, "bytes_asked": 7}
    if status == "ok":
        point |= {"ttft_s": 2.0, "first_step_s": 0.3, "tpot_s": {"median": 1.0, "p99": 3.0}, "kv_fp16": 40}
        point |= {"kv_used": {"total": 10}, "kv_reserved": {"total": 20}, "peak": {"prefill": 8, "decode": 4}}
    measured = {"batch_rows": batch, "point": point}
    return {"id": f"e@{length}/b{batch}", "length": length, "status": status, "measured": measured}


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in rows}


def test_the_largest_batch_is_compared_where_memory_ended_in_both() -> None:
    mine = [row(1, 10.0), row(2, 30.0), row(8, 25.0), row(16, None, "oom"), row(32, None, "oom")]
    ended = [row(1, 10.0), row(2, 15.0), row(4, None, "oom")]
    computed = summarize_points(mine, by_id(ended))
    assert computed is not None
    assert (computed["max_batch"], computed["oom_batch"], computed["best_batch"], computed["tokens_per_s"]) == (
        8,
        16,
        2,
        30.0,
    )
    assert (computed["max_batch_vs_fp16"], computed["tokens_per_s_vs_fp16"]) == (4.0, 2.0)
    assert list(computed["batches"]) == ["1", "2", "8", "16"]
    assert computed["batches"]["2"]["vs_fp16"] == {
        "ttft_s": 1.0,
        "tpot_s": 1.0,
        "tokens_per_s": 2.0,
        "peak_decode": 1.0,
    }
    assert computed["batches"]["8"]["kv_ratio"] == 4.0 and "vs_fp16" not in computed["batches"]["8"]
    for one, other in ((mine, ended[:2]), (mine[:3], ended), (mine[:3], ended[:2])):
        computed = summarize_points(one, by_id(other))
        assert (
            computed is not None and computed["max_batch_vs_fp16"] is None and computed["tokens_per_s_vs_fp16"] == 2.0
        )


def test_other_lengths_and_no_fp16_are_nothing_to_compare_with() -> None:
    mine = [row(1, 10.0), row(2, None, "oom")]
    for other in (None, {}, by_id([row(1, 5.0, length=1024), row(2, None, "oom", length=1024)])):
        computed = summarize_points(mine, other)
        assert computed is not None and computed["max_batch_vs_fp16"] is computed["tokens_per_s_vs_fp16"] is None
    none_fitted = summarize_points([row(1, None, "oom")])
    assert none_fitted is not None and none_fitted["max_batch"] is None and none_fitted["oom_batch"] == 1
    assert summarize_points([{"id": "a", "measured": {}}]) is None


@pytest.mark.parametrize("count", [1, 2])
def test_one_point_gives_the_times_of_the_run_and_several_the_best_rate(count: int) -> None:
    computed = summarize_points([row(1, 10.0), row(2, 30.0)][:count])
    top = headline({"e@512": {"points": computed}})
    assert top["tokens_per_s"] == (10.0, 30.0)[count - 1]
    assert ("ttft_s" in top) == (count == 1)
    assert headline({"e@512": {"points": summarize_points([row(1, None, "oom")])}}) == {}


def test_every_figure_of_a_point_is_kept_but_those_that_become_others() -> None:
    timed = ("ttft_s", "search_s", "prefill_s", "first_step_s", "tpot_s", "itl_s", "tokens_per_s", "capture_s")
    run = (
        "status",
        "stepping",
        "speculation",
        "forced",
        "round_times",
        "path",
        "same",
        "fill",
        "new_tokens",
        "stock",
        "beyond",
    )
    sizes = ("weights", "over_used", "over_reserved", "predicted", "read_bytes", "GB_s", "ceiling", "read_share")
    names = (*timed, *run, *sizes, "over_roof", "energy", "bytes_asked", "phase")
    whole = row(2, 10.0)
    point = whole["measured"]["point"]
    point |= {name: point.get(name, name) for name in names} | {"prompt": 1, "prefill_path": "eager"}
    point |= {"weights": 2, "nominal_bits": {"key": 4.0, "value": 2.0}}
    computed = summarize_points([whole])
    assert computed is not None
    (figures,) = computed["batches"].values()
    assert {name: figures.pop(name) for name in names} == {name: point[name] for name in names}
    kept = {"kv_used": 10, "kv_reserved": 20, "peak_prefill": 8, "peak_decode": 4, "kv_ratio": 4.0}
    compression = {"r_nom": 32 / 6, "r_alloc": 40 / (4 - 2)}
    assert figures == {**kept, "kv_ratio_reserved": 2.0, **compression}


def test_nominal_compression_is_that_of_the_formats():
    assert nominal_compression(4, 4) == 4 and nominal_compression(2, 2) == 8
    # a quarter of the layers in bf16, the others k4v2: 1 / (1/4 + 3/4 * 6/32)
    mixed = 0.25 * 16
    assert nominal_compression(mixed + 0.75 * 4, mixed + 0.75 * 2) == pytest.approx(1 / (0.25 + 0.75 * 6 / 32))
    assert nominal_compression(8, 8, full_bits=32) == 4


def test_allocated_compression_counts_all_memory_beyond_the_weights():
    assert allocated_compression(full_bytes=800, peak=1200, weights=1000) == 4


def test_the_bound_of_the_cache_by_hand():
    """20 ms, of which 10 ms read 40 GB at 4 TB/s: a cache of 10 GB read at 5 TB/s leaves 12 ms."""
    assert cache_bound(0.020, 40e9, 4e12, 10e9, 5e12) == pytest.approx(0.020 / 0.012)
    assert same_work_ratio(0.020, 0.016) == pytest.approx(1.25)
    # nothing is gained if fp16's own cache is already read at the peak rate
    assert cache_bound(0.020, 40e9, 5e12, 40e9, 5e12) == pytest.approx(1)
