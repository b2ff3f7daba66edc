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
    """Return one sentence for each run that is compared with fp16, in the order of the loss, largest first.

    If there are more than :data:`MOST` such runs, the list is empty.

    Args:
        names: names of the runs in the table.
        runs: contents of the runs' `metrics.json`.
    """
    losses = []
    for name, run in zip(names, runs, strict=True):
        pair = (run.get("mean") or {}).get("vs_fp16")
        if run["status"] == "ok" and pair and pair["n"]:
            losses.append((pair["diff"], f"{name} {effect(pair, run['mean'].get('score'))}{memory(run)}"))
    return [line for _, line in sorted(losses, key=lambda loss: loss[0])] if len(losses) <= MOST else []


def effect(pair: Mapping[str, Any], mean: float | None = None) -> str:
    """Return the predicate of a sentence about the difference from fp16, for example ``loses 2.1 ± 0.4 points``.

    A point is 0.01 of the score. For a difference of at most :data:`ERRORS` standard errors, the text says that there
    is no clear difference.

    Args:
        pair: the paired difference, ``{diff, stderr, n}``.
        mean: the run's mean score, or None. If both `mean` and the difference are 0, the text says that the comparison
            shows nothing, because neither run solved any sample.
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
    """Return the end of a sentence about memory compared with fp16; empty if the memory is unknown.

    An example is ``at 4.0x less memory for keys and values``, with a space before it.

    Args:
        run: content of the run's `metrics.json`.
    """
    ratio = run["kv_bytes"]["ratio"]
    if ratio is None:
        return ""
    return f" at {ratio:.1f}x less memory for keys and values" if ratio >= 1 else f" at {1 / ratio:.1f}x more memory"
