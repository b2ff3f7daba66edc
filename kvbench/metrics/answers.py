"""Scores of answers by the name of a metric, for data sets that a YAML file describes without code of their own."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Literal

from kvbench.metrics import gsm8k
from kvbench.metrics.longbench import qa_f1
from kvbench.metrics.reasoning import score_reasoning
from kvbench.metrics.rouge import rouge
from kvbench.metrics.text import exact_match, letter, matched

Metric = Literal[
    "exact_match", "f1", "rouge", "regex", "choice", "gsm8k", "aime", "math", "gpqa", "longbench_v2", "livecodebench"
]

#: the letters that label the options of multiple-choice questions
LETTERS = string.ascii_uppercase


def score_answers(
    metric: Metric, prediction: str, answers: Sequence[str], *, pattern: str | None = None, options: int = 0
) -> dict[str, float]:
    """Score a prediction against its reference answers by the metric that a configuration names.

    There is at least one reference answer. Of several, the one with the best score counts.

    Args:
        metric: ``exact_match`` or ``regex`` (:mod:`kvbench.metrics.text`), ``f1`` of words
            (:func:`kvbench.metrics.longbench.qa_f1`), ``rouge`` (ROUGE-Lsum with stemming), ``choice`` (the first
            option letter that stands alone as a word), ``gsm8k`` (:func:`kvbench.metrics.gsm8k.score_gsm8k`), or a rule
            of :mod:`kvbench.metrics.reasoning`, which takes the first reference answer.
        pattern: regular expression with one group, required by the metric ``regex``.
        options: number of options of the question, required by the metric ``choice``.

    Returns:
        A dict from names to scores in 0..1, which always contains ``score``. ``rouge`` adds each kind of ROUGE
        (:data:`kvbench.metrics.rouge.KINDS`), and ``gsm8k`` adds ``strict`` and ``flexible``.
    """
    if metric == "exact_match":
        return {"score": exact_match(prediction, answers)}
    if metric == "f1":
        return {"score": max(qa_f1(prediction, answer) for answer in answers)}
    if metric == "rouge":
        scores = rouge(prediction, answers)
        return {"score": scores["rougeLsum"], **scores}
    if metric == "regex":
        assert pattern is not None
        return {"score": matched(prediction, answers, pattern)}
    if metric == "gsm8k":
        return max((gsm8k.score_gsm8k(prediction, answer) for answer in answers), key=lambda scores: scores["score"])
    scores_by_rule = score_reasoning(metric, prediction, answers)
    if scores_by_rule is not None:
        return scores_by_rule
    chosen = letter(prediction, LETTERS[:options])
    return {"score": float(chosen is not None and chosen in answers)}
