"""Summaries of the times in a run's rows: TTFT, TPOT and decoding speed, device by device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from kvbench.results.samples import Row


def timings(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Summarize TTFT, TPOT and decoding speed for each device that ran samples, without warm-up samples.

    The median and the p99 of TPOT leave out the first decode step of each sample. That step is reported separately,
    because it includes work that a method does once after the prompt. The result maps the name of a device to the
    fields of :class:`kvbench.results.record_cost.Times`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        timing = row.get("measured") or {}
        timed = timing.get("ttft_s") is not None or timing.get("step_s")
        if timed and not timing.get("warm_up"):
            groups.setdefault(str(timing.get("device")), []).append(timing)
    by_device = {}
    for device, group in groups.items():
        later = [step for timing in group for step in timing["step_s"][1:]]
        first = [timing["step_s"][0] for timing in group if timing["step_s"]]
        # the rows of a batch share the time of a step, so each counts its fraction
        seconds = sum((timing.get("decode_s") or sum(timing["step_s"])) / timing["batch_rows"] for timing in group)
        tokens = sum(timing["decoded"] for timing in group)
        starts = [timing["ttft_s"] for timing in group if timing.get("ttft_s") is not None]
        by_device[device] = {
            "ttft_s": {
                "median": _median(starts),
                "n": len(starts),
                "shared": sum(timing.get("ttft_s") is not None and "shared_prefill" in timing for timing in group),
            },
            "tpot_s": {
                "median": _median(later),
                "p99": percentile(later, 99),
                "first_step": _median(first),
                "n": len(later),
            },
            "tokens_per_s": tokens / seconds if seconds else None,
            "n": len(group),
        }
    return by_device


def no_timings() -> dict[str, Any]:
    """Return an entry of :func:`timings` for a device that timed no samples: all figures None, all counts 0."""
    return {
        "ttft_s": {"median": None, "n": 0, "shared": 0},
        "tpot_s": {"median": None, "p99": None, "first_step": None, "n": 0},
        "tokens_per_s": None,
        "n": 0,
    }


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return a percentile `q` (0 to 100) with linear interpolation, which is numpy's default; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
