"""Short descriptions of samples and rows for loggers and the progress bar, and a note on a method without effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.methods.base import Method
from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: number of characters that loggers show of each end of a prompt
SHOWN = 240


def untouched(method: Method, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return why the method had no effect, if all samples were too short for it to pack or drop a token.

    Args:
        method: the method of the run.
        rows: the rows of the run.

    Returns:
        A dict: ``key`` and ``value``, the hyper-parameter that caused this; ``exact``, the largest number of tokens
        that all stay in full precision with this value; and ``longest``, the largest number of tokens that a sample
        had in the cache. None if the method may have had an effect.
    """
    reach = method.reach()
    cached = [
        # the last token of an answer or of a span is never cached
        int(row["prompt_tokens"]) - ("window" in row) + (0 if reach and reach.of_prompt else _steps(row))
        for row in rows
        if row.get("prompt_tokens")
    ]
    if reach is None or not cached or max(cached) > reach.tokens:
        return None
    return {"key": reach.key, "value": reach.value, "exact": reach.tokens, "longest": max(cached)}


def _steps(row: Row) -> int:
    return max(0, len(row.get("tokens") or ()) - 1)


def shown(sample: Sample) -> dict[str, str]:
    """Return what loggers show of a sample: beginning and end of its prompt, and its first reference answer."""
    head, tail = sample.prompt[:SHOWN], sample.prompt[max(SHOWN, len(sample.prompt) - SHOWN) :]
    return {"prompt_head": head, "prompt_tail": tail, "reference": sample.answers[0] if sample.answers else ""}


def note(row: Row) -> str:
    """Return the text to show after the progress bar: the id of a sample, and its score or else its status."""
    score = row["scores"].get("score")
    if score is None and "status" in row:
        return f"{row['id']} {row['status']}"
    return f"{row['id']} {'-' if score is None else f'{score:.2f}'}"
