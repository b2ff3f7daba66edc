"""The order of runs in the summary of a sweep, best first, and the Pareto front of cost and quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.results.identity import rounded_weights, short_name
from kvbench.results.points import has_points
from kvbench.results.record import Config, Metrics, Samples
from kvbench.results.record_cost import KvBytes, Parts, PeakBytes, Tpot, Ttft
from kvbench.results.record_scores import Mean
from kvbench.results.store import DONE
from kvbench.results.typed import plain_tree

Run = Mapping[str, Any]


def best_first(runs: Sequence[Run]) -> list[Run]:
    """Sort the runs of a sweep for its table, best first.

    Runs with a mean score come first, highest score first; then runs with perplexities, lowest first; then runs that
    measured points (dataset=efficiency), highest throughput first. Of runs with the same value, the one with the
    smallest cache comes first.

    Incomplete runs come last, because their means are over different samples. If all complete runs use speculative
    decoding, runs are sorted by time per token instead, because the draft does not change their outputs.
    """
    done = [run for run in runs if run["status"] in DONE]
    if done and all(run.get("speculation") and run["tpot_s"]["median"] for run in done):
        return sorted(runs, key=lambda run: (run["status"] not in DONE, run["tpot_s"]["median"] or math.inf))
    return sorted(runs, key=_rank)


def _rank(run: Run) -> tuple[bool, int, float, float]:
    score = (run.get("mean") or {}).get("score")
    perplexities = [entry["perplexity"]["ppl"] for entry in run.get("scores", {}).values() if entry.get("perplexity")]
    used = ((run.get("kv_bytes") or {}).get("used") or {}).get("total")
    speed = (run.get("tokens_per_s") or 0.0) if has_points(run) else 0.0
    kind, value = (0, -score) if score is not None else (1, fmean(perplexities)) if perplexities else (2, -speed)
    return run["status"] not in DONE, kind, value, math.inf if used is None else used


def failed(config: Mapping[str, Any], message: str) -> dict[str, Any]:
    """Build the `metrics.json` of a run that could not start: its options and its error, without figures."""
    quantizer = config.get("quantizer") or {}
    run = Metrics(
        run_id=None,
        status="error",
        label=short_name(config),
        config=Config(
            model=config["model"].get("name"),
            method=dict(config["method"]),
            quantizer=quantizer.get("name"),
            formats={key: form for key, form in quantizer.items() if key != "name"},
            dataset=config["dataset"].get("name"),
            decoding=dict(config["decoding"]),
            seed=config["runtime"].get("seed", 0),
            weights=rounded_weights(config),
        ),
        samples=Samples(requested=None, done=0),
        scores={},
        mean=Mean(score=None),
        kv_bytes=KvBytes(used=Parts(), reserved=Parts()),
        peak_bytes=PeakBytes(),
        ttft_s=Ttft(n=0),
        tpot_s=Tpot(),
        tokens_per_s=None,
        error=message,
    )
    content: dict[str, Any] = plain_tree(run, complete=True)
    return content


def front(points: Sequence[tuple[float, float]], higher: bool = True) -> list[int]:
    """Return the indices of the points on the Pareto front, cheapest first.

    A point is a cost and a quality. Lower costs are better. Higher qualities are better with `higher` (scores), lower
    ones without (perplexities).
    """
    sign = -1 if higher else 1
    indices: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not indices or sign * points[i][1] < sign * points[indices[-1]][1]:
            indices.append(i)
    return indices
