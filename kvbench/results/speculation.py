"""Acceptance and speed of a speculative run, from its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.results.samples import Row

#: keys of a method that say how it speculates
SETTINGS = ("gamma", "draft", "draft_weights")


def speculation(rows: Sequence[Row], method: Mapping[str, Any]) -> dict[str, Any] | None:
    """What speculation gave over all samples; None where nothing was drafted.

    Returns:
        The settings; ``acceptance_rate``: accepted drafts over drafted ones, all samples together (the paper's accepted
        over gamma times rounds), with the standard error over samples as clusters; ``tokens_per_round``; the counts
        behind them; ``n`` samples; ``speedup`` over fp16, filled in where such a run exists (:func:`speedup`).
    """
    found = [row["speculation"] for row in rows if row.get("speculation") and row["speculation"]["rounds"]]
    if not found:
        return None
    totals = {key: sum(each[key] for each in found) for key in ("rounds", "drafted", "accepted", "tokens")}
    rate = totals["accepted"] / totals["drafted"] if totals["drafted"] else None
    return {
        **{key: method.get(key) for key in SETTINGS},
        "acceptance_rate": rate,
        "stderr": ratio_error([each["accepted"] for each in found], [each["drafted"] for each in found]),
        "tokens_per_round": totals["tokens"] / totals["rounds"],
        **totals,
        "n": len(found),
        "speedup": None,
    }


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Standard error of ``sum(parts) / sum(wholes)`` where each pair is a cluster (linearised); None for fewer than 2.

    Drafts of one text are not independent, so samples are what is counted.
    """
    n, total = len(parts), sum(wholes)
    if n < 2 or not total:
        return None
    rate = sum(parts) / total
    rest = [part - rate * whole for part, whole in zip(parts, wholes, strict=True)]
    return math.sqrt(n / (n - 1) * sum(value * value for value in rest)) / total


def speedup(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> float | None:
    """How many times faster a token is than in the fp16 run `baseline`, on one device at one batch size, or None."""
    if not baseline or metrics["config"].get("batch_size") != baseline["config"].get("batch_size"):
        return None
    ratios = [
        theirs["tpot_s"]["median"] / mine["tpot_s"]["median"]
        for device, mine in metrics["timings"].items()
        if (theirs := baseline["timings"].get(device)) and mine["tpot_s"]["median"] and theirs["tpot_s"]["median"]
    ]
    return fmean(ratios) if ratios else None
