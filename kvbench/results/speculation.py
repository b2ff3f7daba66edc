"""Acceptance and speed of a speculative run, from its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.results.samples import Row

#: hyper-parameters of a method that control speculation
SETTINGS = ("gamma", "draft", "draft_weights")


def speculation(rows: Sequence[Row], method: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the acceptance rate and related figures of a speculative run; None if nothing was drafted.

    Returns:
        :data:`SETTINGS` with their values; ``acceptance_rate``: accepted over drafted tokens, summed over all samples
        (in the paper, accepted / (gamma * rounds)), and ``stderr``, its standard error with samples as clusters;
        ``tokens_per_round``; the counts ``rounds``, ``drafted``, ``accepted``, ``tokens``; ``n``: the number of
        samples; ``speedup``: None, for the caller to fill in (:func:`speedup`).
    """
    drafts = [row["speculation"] for row in rows if row.get("speculation") and row["speculation"]["rounds"]]
    if not drafts:
        return None
    totals = {key: sum(draft[key] for draft in drafts) for key in ("rounds", "drafted", "accepted", "tokens")}
    rate = totals["accepted"] / totals["drafted"] if totals["drafted"] else None
    return {
        **{key: method.get(key) for key in SETTINGS},
        "acceptance_rate": rate,
        "stderr": ratio_error([draft["accepted"] for draft in drafts], [draft["drafted"] for draft in drafts]),
        "tokens_per_round": totals["tokens"] / totals["rounds"],
        **totals,
        "n": len(drafts),
        "speedup": None,
    }


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Return the standard error of the ratio ``sum(parts) / sum(wholes)``, linearised; None with fewer than two pairs.

    Each pair (one sample) is a cluster, because the drafted tokens of one text are not independent.
    """
    n, total = len(parts), sum(wholes)
    if n < 2 or not total:
        return None
    rate = sum(parts) / total
    rest = [part - rate * whole for part, whole in zip(parts, wholes, strict=True)]
    return math.sqrt(n / (n - 1) * sum(value * value for value in rest)) / total


def speedup(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> float | None:
    """Return fp16's median TPOT over this run's, on the same device and batch size; None if fp16 has no such figure."""
    if not baseline or metrics["config"].get("batch_size") != baseline["config"].get("batch_size"):
        return None
    ratios = [
        full["tpot_s"]["median"] / own["tpot_s"]["median"]
        for device, own in metrics["timings"].items()
        if (full := baseline["timings"].get(device)) and own["tpot_s"]["median"] and full["tpot_s"]["median"]
    ]
    return fmean(ratios) if ratios else None
