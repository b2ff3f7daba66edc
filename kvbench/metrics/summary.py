"""ROUGE of summaries as HELMET and InfiniteBench score them: the package rouge-score with stemming.

LongBench uses another implementation (:mod:`kvbench.metrics.rouge`), whose scores must not be compared with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

#: the kinds of ROUGE that are computed; the score of a summary is the F measure of the last
KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=True)


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return the ROUGE scores of a summary: a dict from each kind in :data:`KINDS` to an F measure in 0..1.

    For each kind, the reference with the best score counts.

    Raises:
        ValueError: `references` is empty.
    """
    if not references:
        raise ValueError("ROUGE needs at least one reference")
    by_reference = [_scorer().score(target=reference, prediction=prediction) for reference in references]
    return {kind: max(float(scores[kind].fmeasure) for scores in by_reference) for kind in KINDS}
