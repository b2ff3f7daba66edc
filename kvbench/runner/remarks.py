"""Remarks on samples and rows: for loggers, for the progress bar, and on a method that had nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.methods.base import Method
from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: characters of a prompt's beginning and end that loggers show
SHOWN = 240


def untouched(method: Method, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return what kept every sample exact, if none was long enough for the method to pack or drop a token; else None.

    Returns:
        ``{"key", "value", "exact", "longest"}``: the hyper-parameter, up to how many tokens it leaves all exact, and
        how many the longest sample had in the cache.
    """
    reach = method.reach()
    cached = [
        # the last token of an answer is never cached, nor is that of a text's window
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
    """Return what a logger shows of a sample with its row: the ends of the prompt and the first reference."""
    head, tail = sample.prompt[:SHOWN], sample.prompt[max(SHOWN, len(sample.prompt) - SHOWN) :]
    return {"prompt_head": head, "prompt_tail": tail, "reference": sample.answers[0] if sample.answers else ""}


def note(row: Row) -> str:
    score = row["scores"].get("score")
    if score is None and "status" in row:
        return f"{row['id']} {row['status']}"
    return f"{row['id']} {'-' if score is None else f'{score:.2f}'}"
