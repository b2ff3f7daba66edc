"""Sentences below the table of a sweep: the loss of each method compared with fp16, and the memory it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.results.aggregate import pair_interval

Metrics = Mapping[str, Any]

#: a loss that is smaller than this many points is called nothing
NOTHING = 1.0
#: maximum number of sentences; with more runs, none are shown
MOST = 8


def findings(names: Sequence[str], runs: Sequence[Metrics]) -> list[str]:
    """Write one sentence for each finished run that has a difference from fp16, the largest loss first.

    An example is ``kivi int2 loses 14.2 points (95 %: 3.7 to 24.7) at 4.3x less memory for keys and values``. There are
    none if they would be more than :data:`MOST`. `names` and `runs` are in the same order.
    """
    losses = []
    for name, run in zip(names, runs, strict=True):
        pair = (run.get("mean") or {}).get("vs_fp16")
        if run["status"] == "ok" and pair and pair["n"]:
            losses.append((pair["diff"], f"{name} {effect(pair, run['mean'].get('score'))}{memory_finding(run)}"))
    return [line for _, line in sorted(losses, key=lambda loss: loss[0])] if len(losses) <= MOST else []


def effect(pair: Mapping[str, Any], mean: float | None = None) -> str:
    """Put a difference from fp16 into words, for example ``loses 2.1 points (95 %: 1.3 to 2.9)``.

    A point is 0.01 of the score. What is said follows from the 95 % interval of the difference alone: a loss or gain if
    it does not contain 0; no loss if it excludes one of :data:`NOTHING` points; else that there is no clear difference.
    A mean score of 0 on all samples in both runs shows nothing, as the text then says; None: unknown. `pair` is
    ``{diff, stderr, n}`` and, if known, ``low`` and ``high``.
    """
    points, n = 100 * pair["diff"], pair["n"]
    samples = "1 sample" if n == 1 else f"{n} samples"
    same = not points and not pair["stderr"]
    if same and mean == 0:
        return f"scores 0 on all {samples}, as does fp16, so the comparison shows nothing"
    interval = pair_interval(mean, pair)
    if interval is None:
        if same:
            return f"shows no difference in {samples}"
        return (
            f"differs from fp16 by {points:+.1f} points (n = {n}, {'too few for' if n < 2 else 'without'} an interval)"
        )
    low, high = (100 * end for end in interval)
    if low > 0 or high < 0:
        near, far = sorted((abs(low), abs(high)))
        return f"{'loses' if points < 0 else 'gains'} {abs(points):.1f} points (95 %: {near:.1f} to {far:.1f})"
    if same:
        if low > -NOTHING:
            return f"loses nothing: less than {NOTHING:g} point on {samples} (95 %: {low:+.1f} to {high:+.1f} points)"
        return f"shows no difference in {samples} (95 %: {low:+.1f} to {high:+.1f} points)"
    return f"shows no clear difference from fp16 ({points:+.1f} points in {samples}; 95 %: {low:+.1f} to {high:+.1f})"


def memory_finding(run: Mapping[str, Any]) -> str:
    """Put the memory saved into words: `` at 4.0x less memory for keys and values``; empty if it is unknown.

    The text begins with a space, to follow :func:`effect`.
    """
    ratio = run["kv_bytes"]["ratio"]
    if ratio is None:
        return ""
    return f" at {ratio:.1f}x less memory for keys and values" if ratio >= 1 else f" at {1 / ratio:.1f}x more memory"
