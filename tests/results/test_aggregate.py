"""Means, errors, paired differences, bytes and timings against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.results import aggregate


def made(index: int, score: float, *, nll: float = 1.0, task: str = "kv", length: int | None = None, **measured):
    bill = {"total": 30, "codes": 10, "scales": 5, "window": 15, "index": 0}
    return {
        "id": f"{task}/{index}",
        "task": task,
        "length": length,
        "prediction": "",
        "scores": {"score": score, "strict": score / 2},
        "scorer_version": 1,
        "nll": {"sum": nll * 3, "n": 3},
        "kv_bytes": {"used": bill, "reserved": bill, "fp16_equivalent": 120},
        "measured": {
            "device": "cpu",
            "warm_up": False,
            "batch_rows": 1,
            "ttft_s": 1.0,
            "step_s": [5.0, 1.0, 2.0],
            "decoded": 3,
            "peak_bytes": {"prefill": 100, "decode": 50, "kind": "cpu_live_tensors", "rss": 1000},
            **measured,
        },
    }


def test_scores_and_paired_differences_as_numpy():
    rng = np.random.default_rng(0)
    full, packed = rng.random(50), rng.random(50)
    baseline = {f"kv/{i}": made(i, full[i], nll=0.5) for i in range(40)}  # ten samples fewer
    entry = aggregate.scores([made(i, packed[i]) for i in range(50)], baseline, version=7)["kv"]
    assert entry["score"] == pytest.approx(packed.mean())
    assert entry["stderr"] == pytest.approx(packed.std(ddof=1) / np.sqrt(50))
    assert (entry["n"], entry["version"]) == (50, 7)
    difference = packed[:40] - full[:40]
    assert entry["vs_fp16"]["diff"] == pytest.approx(difference.mean())
    assert entry["vs_fp16"]["stderr"] == pytest.approx(difference.std(ddof=1) / np.sqrt(40))
    assert entry["vs_fp16"]["n"] == 40
    assert entry["variants"]["strict"]["score"] == pytest.approx(packed.mean() / 2)
    assert entry["nll"]["mean"] == pytest.approx(1.0)
    assert entry["nll"]["vs_fp16"]["diff"] == pytest.approx(0.5)


def test_keys_are_tasks_with_their_length():
    rows = [made(0, 1.0), made(1, 0.0, task="copy", length=512), made(2, 1.0, task="copy", length=2048)]
    assert list(aggregate.scores(rows)) == ["kv", "copy@512", "copy@2048"]


def test_one_sample_has_no_standard_error():
    entry = aggregate.scores([made(0, 1.0)], {"kv/0": made(0, 0.0)})["kv"]
    assert entry["stderr"] is None
    assert entry["vs_fp16"] == {"diff": 1.0, "stderr": None, "n": 1}


def test_no_common_sample_no_difference():
    assert aggregate.scores([made(0, 1.0)], {"kv/9": made(9, 0.0)})["kv"]["vs_fp16"] is None


def test_rows_of_another_scorer_are_not_compared():
    old = {**made(0, 0.0), "scorer_version": 0}
    assert aggregate.scores([made(0, 1.0)], {"kv/0": old})["kv"]["vs_fp16"] is None


def test_overall_is_the_unweighted_mean():
    rows = [made(i, float(i % 2)) for i in range(10)] + [made(i, 1.0, task="copy") for i in range(2)]
    by_task = aggregate.scores(rows)
    mean = aggregate.overall(by_task)
    assert mean["score"] == pytest.approx(0.75)
    assert mean["stderr"] == pytest.approx(by_task["kv"]["stderr"] / 2)
    assert mean["vs_fp16"] is None


def test_bytes_by_part():
    kv = aggregate.kv_bytes([made(0, 1.0), made(1, 1.0)])
    assert kv["used"] == {"total": 30, "codes": 10, "scales": 5, "window": 15, "index": 0}
    assert kv["fp16_equivalent"] == 120
    assert kv["ratio"] == pytest.approx(4.0)
    assert aggregate.kv_bytes([])["used"]["total"] is None


def test_the_ratio_of_a_float32_model_is_to_what_its_full_precision_cache_holds():
    """The same counts in twice the bytes; fp16_equivalent is 16 bits an element whatever the model's dtype."""
    full = {**made(0, 1.0, dtype="float32")}
    full["kv_bytes"] = {**full["kv_bytes"], "used": {**full["kv_bytes"]["used"], "total": 240}}
    assert aggregate.kv_bytes([full])["ratio"] == pytest.approx(1.0)
    assert aggregate.kv_bytes([full])["fp16_equivalent"] == 120
    assert aggregate.kv_bytes([made(0, 1.0, dtype="float32")])["ratio"] == pytest.approx(8.0)
    assert aggregate.kv_bytes([made(0, 1.0, dtype="bfloat16")])["ratio"] == pytest.approx(4.0)


def test_timings_leave_out_warm_up_and_first_steps():
    rows = [made(0, 1.0, warm_up=True, ttft_s=99.0), made(1, 1.0), made(2, 1.0, device="gpu", ttft_s=0.1)]
    times = aggregate.timings(rows)
    assert set(times) == {"cpu", "gpu"}
    assert times["cpu"]["ttft_s"] == {"median": 1.0, "n": 1}
    assert times["cpu"]["tpot_s"]["median"] == pytest.approx(1.5)
    assert times["cpu"]["tpot_s"]["first_step"] == pytest.approx(5.0)
    assert times["cpu"]["tokens_per_s"] == pytest.approx(3 / 8)


def test_tokens_per_second_of_a_batch_share_its_time():
    rows = [made(i, 1.0, batch_rows=4) for i in range(4)]
    assert aggregate.timings(rows)["cpu"]["tokens_per_s"] == pytest.approx(12 / 8)


def test_percentile_as_numpy():
    values = list(np.random.default_rng(1).random(37))
    assert aggregate.percentile(values, 99) == pytest.approx(np.percentile(values, 99))
    assert aggregate.percentile([], 99) is None


def test_peaks_are_the_largest_and_say_how_they_were_counted():
    uncounted = {"prefill": None, "decode": None, "kind": None, "rss": 5000}
    rows = [made(0, 1.0), made(1, 1.0, peak_bytes=uncounted)]
    assert aggregate.peak_bytes(rows) == {
        "prefill": 100,
        "decode": 50,
        "kind": "cpu_live_tensors",
        "rss": 5000,
        "n": 1,
    }
