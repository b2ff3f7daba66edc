"""Short descriptions of samples and rows for loggers and the progress bar, and a check that a method had an effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.methods.base import Method
from kvbench.results.samples import Row
from kvbench.tasks.base import Sample

#: number of characters that loggers show of each end of a prompt
SHOWN = 240


def untouched(method: Method, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the hyper-parameter that kept the method from having any effect, because all samples were too short.

    A method has an effect as soon as it packs or drops a token. Many methods keep a number of tokens in full precision;
    if no sample has more, nothing is packed. The result has the fields of :class:`kvbench.results.record.Untouched`;
    None if the method may have had an effect.
    """
    reach = method.reach()
    cached = [
        # the last token of an answer or of a span is never cached
        int(row["prompt_tokens"]) - ("window" in row) + (0 if reach and reach.of_prompt else _step_count(row))
        for row in rows
        if row.get("prompt_tokens")
    ]
    if reach is None or not cached or max(cached) > reach.tokens:
        return None
    return {"key": reach.key, "value": reach.value, "exact": reach.tokens, "longest": max(cached)}


def _step_count(row: Row) -> int:
    compared = row.get("fidelity")
    if compared:  # one position per decoded token; a simulated pass decodes none
        return len(compared["kld"]) if compared["mode"] == "decode" else 0
    return max(0, len(row.get("tokens") or ()) - 1)


def shown_excerpts(sample: Sample) -> dict[str, str]:
    """Return the excerpts of a sample that loggers show.

    They are ``prompt_head`` and ``prompt_tail``, up to :data:`SHOWN` characters each, and ``reference``, the first
    reference answer, which is empty if there is none. Of a private sample they say that it is withheld.
    """
    if sample.private:
        return dict.fromkeys(("prompt_head", "prompt_tail", "reference"), "(withheld: the data set is private)")
    head, tail = sample.prompt[:SHOWN], sample.prompt[max(SHOWN, len(sample.prompt) - SHOWN) :]
    return {"prompt_head": head, "prompt_tail": tail, "reference": sample.answers[0] if sample.answers else ""}


def note(row: Row) -> str:
    """Return the text after the progress bar: a sample's id, and its score, or its status if it has no score."""
    score = row["scores"].get("score")
    if score is None and "status" in row:
        return f"{row['id']} {row['status']}"
    return f"{row['id']} {'-' if score is None else f'{score:.2f}'}"
