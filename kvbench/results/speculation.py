"""Acceptance and speed of a speculative run, from its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.results.round_times import round_times, summed
from kvbench.results.samples import MEASURED, Row

#: hyper-parameters of a method that control speculation
SETTINGS = ("gamma", "draft", "draft_weights")


def speculation(rows: Sequence[Row], method: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the acceptance rate and related figures of a run with speculative decoding; None if nothing was drafted.

    They are the content of :class:`kvbench.results.record_cost.Speculation`. ``acceptance_rate`` is the number of
    accepted tokens divided by the number of drafted ones, both summed over all samples (in the paper,
    ``accepted / (gamma * rounds)``), and ``stderr`` its standard error, clustered by sample. ``round_times`` leaves out
    warm-up samples, as all times do. The caller sets ``speedup`` and ``expected_speedup`` (:func:`add_speedups`).
    `method` holds the options of the method.
    """
    drafts = [row["speculation"] for row in rows if row.get("speculation") and row["speculation"]["rounds"]]
    if not drafts:
        return None
    totals = {key: sum(draft[key] for draft in drafts) for key in ("rounds", "drafted", "accepted", "tokens")}
    rate = totals["accepted"] / totals["drafted"] if totals["drafted"] else None
    timings = [row.get(MEASURED) or {} for row in rows]
    rounds = summed(timing.get("rounds") for timing in timings if not timing.get("warm_up"))
    return {
        **{key: method.get(key) for key in SETTINGS},
        "acceptance_rate": rate,
        "stderr": ratio_error([draft["accepted"] for draft in drafts], [draft["drafted"] for draft in drafts]),
        "tokens_per_round": totals["tokens"] / totals["rounds"],
        **totals,
        "n": len(drafts),
        "speedup": None,
        "expected_speedup": None,
        "round_times": round_times(rounds),
    }


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Return the standard error of the ratio ``sum(parts) / sum(wholes)``, to first order (linearised).

    Each pair of a part and a whole, such as accepted and drafted tokens, belongs to one sample and forms a cluster,
    because the drafted tokens of one text are not independent. The error is None with fewer than two pairs, or if the
    denominator is 0.
    """
    n, total = len(parts), sum(wholes)
    if n < 2 or not total:
        return None
    rate = sum(parts) / total
    rest = [part - rate * whole for part, whole in zip(parts, wholes, strict=True)]
    return math.sqrt(n / (n - 1) * sum(value * value for value in rest)) / total


def add_speedups(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> None:
    """Set ``speedup`` and ``expected_speedup`` of a run's speculation, in place, from the `metrics.json` of both runs.

    The expected speed-up is the measured one times the ratio between the measured and the expected time per token.
    `baseline`, the fp16 run, is None if there is none.
    """
    figures = metrics["speculation"]
    figures["speedup"] = measured = speedup(metrics, baseline)
    times = figures.get("round_times")
    figures["expected_speedup"] = measured * times["tpot_s"] / times["expected_tpot_s"] if measured and times else None


def speedup(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> float | None:
    """Return the speed-up of a run over its fp16 run: fp16's median TPOT divided by the run's median TPOT.

    Only times from the same device are compared. If both runs were timed on several devices, the result is the mean of
    one ratio per device. It is None if there is no fp16 run, if it used another batch size, or if no device has timed
    both runs.
    """
    if not baseline or metrics["config"].get("batch_size") != baseline["config"].get("batch_size"):
        return None
    ratios = [
        full["tpot_s"]["median"] / own["tpot_s"]["median"]
        for device, own in metrics["timings"].items()
        if (full := baseline["timings"].get(device)) and own["tpot_s"]["median"] and full["tpot_s"]["median"]
    ]
    return fmean(ratios) if ratios else None
