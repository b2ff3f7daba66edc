"""Findings of a sweep, read from its rows: signs, sizes, and differences that do not count."""

from __future__ import annotations

from kvbench.results.notes import effect, findings, memory_finding


def run(name, diff, stderr, ratio=4.29, n=40, status="ok"):
    pair = None if diff is None else {"diff": diff, "stderr": stderr, "n": n}
    return {
        "label": name,
        "status": status,
        "run_id": name,
        "config": {"method": {}, "decoding": {}},
        "mean": {"score": 0.9, "stderr": 0.1, "n": n, "vs_fp16": pair},
        "kv_bytes": {"ratio": ratio},
    }


def test_losses_gains_and_what_is_neither():
    runs = [
        run("fp16", None, None, 1.0),
        run("same", 0.0, 0.0, 2.85),
        run("chance", -0.025, 0.025, 3.56),
        run("worse", -0.142, 0.052),
        run("better", 0.3, 0.1, 0.5),
        run("one", -0.5, None, None, n=1),
        run("broken", -0.9, 0.1, status="error"),
    ]
    assert findings([each["label"] for each in runs], runs) == [
        "one differs from fp16 by -50.0 points (n = 1, too few for an interval)",
        "worse loses 14.2 points (95 %: 3.7 to 24.7) at 4.3x less memory for keys and values",
        "chance shows no clear difference from fp16 (-2.5 points in 40 samples; 95 %: -12.8 to +6.7) at 3.6x less "
        "memory for keys and values",
        "same shows no difference in 40 samples (95 %: -8.4 to +8.4 points) at 2.9x less memory for keys and values",
        "better gains 30.0 points (95 %: 9.8 to 50.2) at 2.0x more memory",
    ]


def test_nothing_is_lost_only_where_a_loss_of_a_point_is_excluded():
    """Without a loss in n samples, 3.84 / (n + 3.84) of all answers may be lost; that is a point at 380."""
    sentences = {n: effect({"diff": 0.0, "stderr": 0.0, "n": n}, 1.0) for n in (8, 380, 381)}
    assert sentences[8] == "shows no difference in 8 samples (95 %: -32.4 to +32.4 points)"
    assert sentences[380].startswith("shows no difference in 380 samples (95 %: -1.0 to")
    assert sentences[381] == "loses nothing: less than 1 point on 381 samples (95 %: -1.0 to +1.0 points)"


def test_a_single_sample_has_the_interval_that_the_table_shows():
    assert effect({"diff": 0.0, "stderr": None, "n": 1}, 1.0) == (
        "shows no difference in 1 sample (95 %: -79.3 to +79.3 points)"
    )


def test_no_interval_is_printed_where_none_is_known():
    assert (
        effect({"diff": 0.2, "stderr": 0.0, "n": 8}) == "differs from fp16 by +20.0 points (n = 8, without an interval)"
    )


def test_a_stored_interval_decides_and_not_the_standard_error():
    pair = {"diff": -0.1, "stderr": 0.04, "n": 8, "low": -0.4, "high": 0.05}
    assert effect(pair, 0.9).startswith("shows no clear difference from fp16 (-10.0 points in 8 samples; 95 %: -40.0")
    assert effect({**pair, "high": -0.01}, 0.9) == "loses 10.0 points (95 %: 1.0 to 40.0)"


def test_nothing_is_said_without_a_baseline_or_of_a_long_table():
    assert findings(["kivi", "fp16"], [run("kivi", None, None), run("fp16", None, None)]) == []
    assert findings(["a"] * 9, [run("a", -0.5, 0.1)] * 9) == []


def test_two_scores_of_nothing_show_nothing():
    broken = run("kivi", 0.0, 0.0)
    broken["mean"]["score"] = 0.0
    assert findings(["kivi"], [broken]) == [
        "kivi scores 0 on all 40 samples, as does fp16, so the comparison shows nothing at 4.3x less "
        "memory for keys and values"
    ]


def test_a_difference_of_nothing_without_an_interval_is_no_difference():
    assert effect({"diff": 0.0, "stderr": 0.0, "n": 1}, None).startswith("shows no difference in 1 sample")
    assert effect({"diff": 0.0, "stderr": 0.0, "n": 5}, 0) == (
        "scores 0 on all 5 samples, as does fp16, so the comparison shows nothing"
    )


def test_memory_is_told_from_both_sides_of_fp16():
    assert memory_finding({"kv_bytes": {"ratio": 1.0}}) == " at 1.0x less memory for keys and values"
    assert memory_finding({"kv_bytes": {"ratio": 0.8}}) == " at 1.2x more memory"
    assert memory_finding({"kv_bytes": {"ratio": None}}) == ""


def test_a_table_of_many_runs_has_no_findings():
    runs = [run(f"r{number}", -0.01 * number, 0.001) for number in range(9)]
    names = [each["label"] for each in runs]
    assert [line.split()[0] for line in findings(names[:8], runs[:8])] == [f"r{number}" for number in range(7, -1, -1)]
    assert findings(names, runs) == []
