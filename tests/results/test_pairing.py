"""A paired difference is over the rows that the score is over, whatever else the file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.results import samples, summary
from kvbench.results.store import RunStore
from tests.run_support import config

SETTING = "0123456789"


def row(index: int, score: float, nll: float) -> dict:
    return {
        "id": f"text/{index}",
        "task": "text",
        "length": None,
        "prediction": "",
        "scores": {"score": score},
        "scorer_version": 1,
        "nll": {"sum": 10 * nll, "n": 10},
        "window": {"bytes": 40, "mode": "cache", "prefill": 0, "chunk": 1},
        "measured": {"device": "cpu", "warm_up": False, "ttft_s": None, "step_s": [], "batch_rows": 1, "decoded": 0},
    }


def finished(folder: Path, name: str, rows: list[dict], counted: int) -> RunStore:
    """A run whose `metrics.json` is over its first `counted` rows."""
    store = RunStore(folder, f"{SETTING}-{name}")
    with store.hold():
        store.start(config(folder, "fp16" if name.startswith("f") else "kivi"))
        store.append(rows)
        store.write_metrics(
            summary.build(
                store,
                store.config() or {},
                status="ok",
                rows=rows[:counted],
                left_out=[each["id"] for each in rows[counted:]],
                requested=counted,
                task_version=1,
                environment={},
            )
        )
    return store


@pytest.mark.parametrize("counted", [2, 3, 6])
def test_the_difference_is_over_the_rows_that_the_score_counts(tmp_path: Path, counted: int) -> None:
    kivi = finished(tmp_path, "aaaaaaaaaa", [row(i, 0.1 * i, 1.0 + 0.1 * i) for i in range(6)], counted)
    full = finished(tmp_path, "ffffffffff", [row(i, 1.0, 1.0) for i in range(6)], 6)
    assert summary.pair_siblings(full) == 1
    entry = json.loads((kivi.path / "metrics.json").read_text())["scores"]["text"]
    expected = sum(0.1 * i - 1.0 for i in range(counted)) / counted
    assert entry["vs_fp16"]["n"] == entry["n"] == counted
    assert entry["vs_fp16"]["diff"] == pytest.approx(expected)
    assert entry["nll"]["vs_fp16"]["n"] == counted
    assert entry["perplexity"]["windows"] == entry["perplexity"]["vs_fp16"]["n"] == counted
    assert entry["score"] == pytest.approx(sum(0.1 * i for i in range(counted)) / counted)
    mean = json.loads((kivi.path / "metrics.json").read_text())["mean"]
    assert mean["vs_fp16"]["n"] == mean["n"] == counted


def test_a_run_whose_rows_have_changed_since_is_left_to_pair_itself(tmp_path: Path) -> None:
    kivi = finished(tmp_path, "aaaaaaaaaa", [row(i, 0.5, 1.0) for i in range(4)], 4)
    samples.append(kivi.samples_path, [row(9, 0.0, 2.0)])  # killed before it wrote its metrics again
    before = (kivi.path / "metrics.json").read_bytes()
    full = finished(tmp_path, "ffffffffff", [row(i, 1.0, 1.0) for i in range(10)], 10)
    messages: list[str] = []
    full.say = messages.append
    assert summary.pair_siblings(full) == 0
    assert (kivi.path / "metrics.json").read_bytes() == before
    assert len(messages) == 1 and kivi.run_id in messages[0] and "run its command again" in messages[0]


def test_only_fp16_pairs_others_and_never_itself(tmp_path: Path) -> None:
    kivi = finished(tmp_path, "aaaaaaaaaa", [row(0, 0.5, 1.0)], 1)
    full = finished(tmp_path, "ffffffffff", [row(0, 1.0, 1.0)], 1)
    assert summary.pair_siblings(kivi) == 0
    assert summary.pair_siblings(full) == 1
    assert (full.metrics() or {})["baseline"] is None
    assert (kivi.metrics() or {})["baseline"] == full.run_id
    again = finished(tmp_path, "aaaaaaaaab", [row(0, 0.5, 1.0)], 1)
    assert (again.metrics() or {})["baseline"] == full.run_id


def test_a_foreign_sibling_costs_no_other_its_difference(tmp_path: Path) -> None:
    foreign = RunStore(tmp_path, f"{SETTING}-000000000b")
    with foreign.hold():
        (foreign.path / "metrics.json").write_text('{"status": "ok"}')
    kivi = finished(tmp_path, "aaaaaaaaaa", [row(0, 0.5, 1.0)], 1)
    assert summary.pair_siblings(finished(tmp_path, "ffffffffff", [row(0, 1.0, 1.0)], 1)) == 1
    assert (kivi.metrics() or {})["scores"]["text"]["vs_fp16"]["diff"] == -0.5
