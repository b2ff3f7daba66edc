"""The order of runs in the summary of a sweep."""

from __future__ import annotations

from typing import Any

from kvbench.results.ranking import best_first


def run(name: str, score: float | None = None, used: int | None = None, status: str = "ok", **more: Any) -> dict:
    return {
        "run_id": name,
        "status": status,
        "mean": {"score": score},
        "kv_bytes": {"used": {} if used is None else {"total": used}},
        **more,
    }


def ordered(*runs: dict) -> list[str]:
    orders = [[entry["run_id"] for entry in best_first(given)] for given in (runs, runs[::-1])]
    assert orders[0] == orders[1]
    return orders[0]


def test_equal_scores_are_ordered_by_bytes_and_unknown_bytes_come_last() -> None:
    assert ordered(run("unknown", 0.5), run("large", 0.5, 300), run("small", 0.5, 200), run("better", 0.75, 400)) == [
        "better",
        "small",
        "large",
        "unknown",
    ]


def test_scores_come_before_perplexities_and_what_did_not_finish_comes_last() -> None:
    texts = [
        run(name, scores={"pg19": {"perplexity": {"ppl": perplexity}}}) for name, perplexity in (("9", 9.0), ("7", 7.0))
    ]
    assert ordered(run("cut", 1.0, status="interrupted"), *texts, run("scored", 0.25)) == ["scored", "7", "9", "cut"]
