"""Sentences below the table of a sweep: the loss of each method compared with fp16, and the memory it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Metrics = Mapping[str, Any]

#: a difference counts as clear if it is more than this many standard errors from zero
ERRORS = 2.0
#: maximum number of sentences; with more runs, none are shown
MOST = 8


def findings(names: Sequence[str], runs: Sequence[Metrics]) -> list[str]:
    """Write one sentence for each finished run that has a difference from fp16, the largest loss first.

    An example is ``kivi int2 loses 14.2 ± 5.2 points at 4.3x less memory for keys and values``.

    Args:
        names: names of the runs in the table.
        runs: contents of the runs' `metrics.json`, in the same order.

    Returns:
        The sentences; none if there would be more than :data:`MOST`.
    """
    losses = []
    for name, run in zip(names, runs, strict=True):
        pair = (run.get("mean") or {}).get("vs_fp16")
        if run["status"] == "ok" and pair and pair["n"]:
            losses.append((pair["diff"], f"{name} {effect(pair, run['mean'].get('score'))}{memory(run)}"))
    return [line for _, line in sorted(losses, key=lambda loss: loss[0])] if len(losses) <= MOST else []


def effect(pair: Mapping[str, Any], mean: float | None = None) -> str:
    """Put a difference from fp16 into words, for example ``loses 2.1 ± 0.4 points``, to follow the name of a run.

    A point is 0.01 of the score. A difference of at most :data:`ERRORS` standard errors is called unclear.

    Args:
        pair: the paired difference, ``{diff, stderr, n}``.
        mean: the run's mean score; None if unknown. If it is 0 on all samples in both runs, the text says that the
            comparison shows nothing.
    """
    points, error = 100 * pair["diff"], pair["stderr"]
    if error is None:
        return f"differs from fp16 by {points:+.1f} points (n = {pair['n']}, too few for a standard error)"
    size = f"{abs(points):.1f} ± {100 * error:.1f} points"
    if not points and not error and mean == 0:
        return f"scores 0 on all {pair['n']} samples, as does fp16, so the comparison shows nothing"
    if not points and not error:
        return f"loses nothing on {pair['n']} samples"
    if abs(points) <= ERRORS * 100 * error:
        return f"shows no clear difference from fp16 ({points:+.1f} ± {100 * error:.1f} points)"
    return f"{'loses' if points < 0 else 'gains'} {size}"


def memory(run: Mapping[str, Any]) -> str:
    """Put the memory saved into words: `` at 4.0x less memory for keys and values``, to follow :func:`effect`.

    Args:
        run: content of the run's `metrics.json`.

    Returns:
        The text, which begins with a space; empty if the memory is unknown.
    """
    ratio = run["kv_bytes"]["ratio"]
    if ratio is None:
        return ""
    return f" at {ratio:.1f}x less memory for keys and values" if ratio >= 1 else f" at {1 / ratio:.1f}x more memory"
