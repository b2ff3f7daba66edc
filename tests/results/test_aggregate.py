"""Means, errors, paired differences, bytes and timings against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.metrics import intervals
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


def test_several_answers_to_a_problem_are_one_cluster():
    """avg@n and its error, and those of the paired difference, equal a bootstrap over problems within 5 %."""
    rng = np.random.default_rng(3)
    level = rng.random(30)
    right = (rng.random((2, 10, 30)) < level).astype(float)  # [run, answer, problem]
    rows, others = (
        [{**made(0, right[run, k, p]), "id": f"kv/{p}~{k}", "problem": f"kv/{p}"} for k in range(10) for p in range(30)]
        for run in range(2)
    )
    entry = aggregate.scores(rows, {row["id"]: row for row in others})["kv"]
    assert (entry["n"], entry["answers"], entry["vs_fp16"]["n"]) == (30, 300, 30)
    assert entry["score"] == pytest.approx(right[0].mean())
    picks = rng.integers(0, 30, size=(20_000, 30))
    for error, values in ((entry["stderr"], right[0]), (entry["vs_fp16"]["stderr"], right[0] - right[1])):
        drawn = values.mean(0)[picks].mean(1)
        assert error == pytest.approx(drawn.std(), rel=0.05)
    assert entry["stderr"] > 1.5 * right[0].std() / np.sqrt(300)  # as if all answers were independent
    assert entry["variants"]["strict"]["stderr"] == pytest.approx(entry["stderr"] / 2)
    assert "answers" not in aggregate.scores([made(0, 1.0)])["kv"]


def test_keys_are_tasks_with_their_length():
    rows = [made(0, 1.0), made(1, 0.0, task="copy", length=512), made(2, 1.0, task="copy", length=2048)]
    assert list(aggregate.scores(rows)) == ["kv", "copy@512", "copy@2048"]


def test_one_sample_has_no_standard_error():
    entry = aggregate.scores([made(0, 1.0)], {"kv/0": made(0, 0.0)})["kv"]
    assert entry["stderr"] is None
    low, high = intervals.newcombe(0, 1, 0, 0)
    assert entry["vs_fp16"] == {"diff": 1.0, "stderr": None, "n": 1, "low": low, "high": high} and low < 0


def scored(scores, others):
    rows = [made(index, score) for index, score in enumerate(scores)]
    return aggregate.scores(rows, {row["id"]: row for row in map(made, range(len(others)), others)})["kv"]


def test_intervals_are_stored_beside_scores_and_differences():
    """Shares have Wilson's and Newcombe's, other scores a bootstrap, and none has the width 0."""
    share = scored([1.0] * 6 + [0.0] * 2, [1.0] * 8)
    assert (share["low"], share["high"]) == intervals.wilson(6, 8)
    assert (share["vs_fp16"]["low"], share["vs_fp16"]["high"]) == intervals.newcombe(6, 0, 2, 0)
    part = scored([1.0] * 6 + [1 / 3] * 2, [1.0] * 8)
    assert part["low"] < part["score"] < part["high"] <= 1 and part["vs_fp16"]["low"] < -1 / 6 < part["vs_fp16"]["high"]
    same = scored([1 / 3] * 8, [1 / 3] * 8)
    assert same["vs_fp16"]["low"] == -same["vs_fp16"]["high"] < -0.3
    above = scored([2.0] * 8, [1.0] * 8)
    assert "low" not in above and "low" not in above["vs_fp16"]  # not a score in 0..1


def test_shares_over_equally_many_samples_are_counted_together():
    entries = {"a": scored([1.0] * 8, [1.0] * 8), "b": scored([1.0] * 7 + [0.0], [1.0] * 8)}
    mean = aggregate.overall(entries)
    assert (mean["low"], mean["high"]) == intervals.wilson(15, 16)
    assert (mean["vs_fp16"]["low"], mean["vs_fp16"]["high"]) == intervals.newcombe(15, 0, 1, 0)
    mixed = aggregate.overall({**entries, "c": scored([1.0] * 7 + [1 / 3], [1.0] * 8)})
    pair = mixed["vs_fp16"]
    spread = intervals.student(23) * pair["stderr"]
    assert (pair["low"], pair["high"]) == pytest.approx((pair["diff"] - spread, pair["diff"] + spread))


def test_runs_without_stored_intervals_have_those_of_their_moments():
    new = scored([1.0] * 6 + [0.0] * 2, [1.0] * 7 + [0.0])
    pair = {key: new["vs_fp16"][key] for key in ("diff", "stderr", "n")}
    old = {"score": new["score"], "stderr": new["stderr"], "n": 8}
    assert aggregate.interval_of(old) == pytest.approx(aggregate.interval_of(new))
    assert aggregate.pair_interval(0.75, pair) == pytest.approx((new["vs_fp16"]["low"], new["vs_fp16"]["high"]))
    assert aggregate.interval_of({"score": 33.0, "stderr": 1.0, "n": 8}) is None


def test_no_common_sample_no_difference():
    assert aggregate.scores([made(0, 1.0)], {"kv/9": made(9, 0.0)})["kv"]["vs_fp16"] is None


def test_the_newest_scorer_of_the_rows_is_named():
    rows = [{**made(index, 1.0), "scorer_version": version} for index, version in enumerate((2, 3, 1))]
    assert aggregate.scores(rows)["kv"]["scorer_version"] == 3


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
    assert kv["used"] == {"total": 30, "codes": 10, "scales": 5, "window": 15, "index": 0, "state": 0}
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
    assert times["cpu"]["ttft_s"] == {"median": 1.0, "n": 1, "shared": 0}
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


def window(index: int, nll: float, size: int = 40) -> dict:
    return {**made(index, 0.0, nll=nll), "window": {"bytes": size, "mode": "cache", "prefill": "exact", "chunk": 4}}


def test_perplexity_and_its_errors_as_numpy():
    nll = np.array([1.0, 1.5, 2.5, 1.2])
    full = np.array([0.9, 1.5, 2.0, 1.3])
    rows = [window(i, value) for i, value in enumerate(nll)]
    computed = aggregate.scores(rows, {f"kv/{i}": window(i, value) for i, value in enumerate(full)})["kv"]["perplexity"]
    ppl, difference = np.exp(nll.mean()), nll - full
    assert computed["ppl"] == pytest.approx(ppl)
    assert computed["stderr"] == pytest.approx(ppl * nll.std(ddof=1) / 2)
    assert computed["bits_per_byte"] == pytest.approx(3 * nll.sum() / np.log(2) / 160)
    assert computed["vs_fp16"]["diff"] == pytest.approx(ppl - np.exp(full.mean()))
    assert computed["vs_fp16"]["stderr"] == pytest.approx(ppl * difference.std(ddof=1) / 2)
    assert (computed["vs_fp16"]["n"], computed["windows"], computed["mode"], computed["chunk"]) == (4, 4, "cache", 4)
    one = aggregate.scores(rows[:1])["kv"]["perplexity"]
    assert one["stderr"] is None and one["vs_fp16"] is None and one["ppl"] == pytest.approx(np.exp(1.0))
    assert aggregate.scores([made(0, 1.0)])["kv"]["perplexity"] is None
    assert aggregate.scores([window(0, 1.0, size=0)])["kv"]["perplexity"]["bits_per_byte"] is None


def test_a_row_whose_search_has_no_time_counts_for_its_steps_alone():
    rows = [made(0, 1.0, ttft_s=None), made(1, 1.0, ttft_s=3.0), made(2, 1.0, ttft_s=None, step_s=[], decoded=0)]
    computed = aggregate.timings(rows)["cpu"]
    assert computed["ttft_s"] == {"median": 3.0, "n": 1, "shared": 0}
    assert computed["tpot_s"]["n"] == 4 and computed["n"] == 2
    assert aggregate.timings([made(0, 1.0, ttft_s=None)])["cpu"]["ttft_s"] == {"median": None, "n": 0, "shared": 0}


def test_the_difference_of_the_mean_needs_all_tasks():
    full = {f"{task}/{i}": made(i, 0.0, task=task) for task in ("kv", "copy") for i in range(4)}
    rows = [made(i, float(i), task=task) for task in ("kv", "copy") for i in range(4)]
    both = aggregate.overall(aggregate.scores(rows, full))
    assert both["vs_fp16"]["diff"] == pytest.approx(1.5) and both["vs_fp16"]["n"] == 8
    each = np.arange(4.0).std(ddof=1) / 2
    assert both["vs_fp16"]["stderr"] == pytest.approx(np.sqrt(2) * each / 2)
    assert both["stderr"] == pytest.approx(np.sqrt(2) * each / 2)
    one = {name: row for name, row in full.items() if row["task"] == "kv"}
    assert aggregate.overall(aggregate.scores(rows, one))["vs_fp16"] is None
    assert aggregate.overall({}) == {"score": None, "stderr": None, "n": 0, "vs_fp16": None}


def test_bytes_are_means_and_the_ratio_is_of_sums():
    small, large = made(0, 1.0), made(1, 1.0)
    bill = {"total": 90, "codes": 40, "scales": 20, "window": 25, "index": 5}
    large["kv_bytes"] = {"used": bill, "reserved": {**bill, "total": 100, "window": 35}, "fp16_equivalent": 360}
    computed = aggregate.kv_bytes([small, large, {**made(2, 1.0), "kv_bytes": None}])
    assert computed["used"] == {"total": 59, "codes": 25, "scales": 12, "window": 20, "index": 2, "state": 0}
    assert computed["reserved"]["window"] == 25
    assert computed["fp16_equivalent"] == 240 and computed["ratio"] == pytest.approx(480 / 120)


def test_measured_points_and_comparisons_are_entries_of_their_task_alone(monkeypatch):
    asked = []

    def of(kind):
        def folded(group, *baseline):
            asked.append((kind, [one["id"] for one in group], *baseline))
            return {kind: len(group)} if group[0]["task"] == kind else None

        return folded

    monkeypatch.setattr(aggregate, "summarize_points", of("points"))
    monkeypatch.setattr(aggregate, "fold_fidelity_rows", of("fidelity"))
    base = {"length": None, "scores": {}, "scorer_version": 1}
    rows = [{**base, "id": str(k), "task": task} for k, task in enumerate(("points", "fidelity", "points"))]
    by_task = aggregate.scores(rows, {}, 4)
    assert by_task["points"]["points"] == {"points": 2} and "fidelity" not in by_task["points"]
    assert by_task["fidelity"]["fidelity"] == {"fidelity": 1} and "points" not in by_task["fidelity"]
    assert asked[:2] == [("points", ["0", "2"], {}), ("fidelity", ["0", "2"])]
    assert {entry["version"] for entry in by_task.values()} == {4}
