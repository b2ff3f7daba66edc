"""The distributions of a run's times: percentiles over its samples and decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.page.numbers import short
from kvbench.results.aggregate import percentile
from kvbench.results.samples import MEASURED, Row

#: the percentiles of a distribution
PERCENTILES = (5, 25, 50, 75, 95)


def spread(rows: Iterable[Row], device: str | None) -> tuple[list[Any], list[Any]]:
    """Return the distributions of TTFT over samples and of the time per token over decode steps.

    Only times of the device count; None: of every device. Warm-up samples and each sample's first decode step are left
    out, as in the medians of `metrics.json`. Each distribution has the :data:`PERCENTILES` in seconds and the number of
    values; empty without values.
    """
    first: list[float] = []
    later: list[float] = []
    for row in rows:
        timing = row.get(MEASURED) or {}
        if timing.get("warm_up") or (device is not None and timing.get("device") != device):
            continue
        start = short(timing.get("ttft_s"))
        if start is not None:
            first.append(start)
        steps = [short(step) for step in (timing.get("step_s") or ())[1:]]
        later += [step for step in steps if step is not None]
    return _percentiles(first), _percentiles(later)


def _percentiles(values: Sequence[float]) -> list[Any]:
    if not values:
        return []
    ordered = sorted(values)
    return [*(short(percentile(ordered, q)) for q in PERCENTILES), len(values)]
