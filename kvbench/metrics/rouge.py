"""ROUGE-L as the package `rouge` 1.0.1 computes it, without its recursion limit.

LongBench scores summaries with that package. It differs from other implementations of ROUGE-L (`rouge-score`):
sentences end at every ".", words are split at whitespace and keep case and punctuation, words are counted as *sets*
(repeats count once), and the union of the longest common subsequences is taken over all pairs of sentences. The package
backtracks through the dynamic-programming table with one recursive call per step. If a pair of sentences needs more
steps than Python's recursion limit (1000) allows, it raises, and LongBench's bare ``except`` makes the score 0. Here
the backtracking is a loop; :attr:`RougeL.limited` is the score with that fault.

HELMET and InfiniteBench score summaries with the package `rouge-score` (:func:`rouge`); those scores must not be
compared with LongBench's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

#: recursive calls available to the package inside LongBench's eval.py: Python's 1000, less the frames above it
RECURSION_STEPS = 990


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L of one text against a reference, in 0..1.

    `steps` is the number of recursive calls that the package `rouge` would need: the largest number over all pairs of a
    sentence of the text and one of the reference.
    """

    f: float
    precision: float
    recall: float
    steps: int

    @property
    def limited(self) -> float:
        """F measure as LongBench's code reports it: 0 if the package `rouge` would exceed Python's recursion limit."""
        return 0.0 if self.steps > RECURSION_STEPS else self.f


def rouge_l(prediction: str, reference: str) -> RougeL:
    """Return the summary-level ROUGE-L of a prediction against one reference.

    If one of the texts is empty or consists only of full stops, all three scores are 0, as in LongBench's code, which
    catches the error of the package.
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return RougeL(0.0, 0.0, 0.0, 0)
    common: set[str] = set()
    steps = 0
    for reference_words in wanted:
        for words in predicted:
            subsequence, walked = _common_subsequence(reference_words, words)
            common |= subsequence
            steps = max(steps, walked)
    recall = len(common) / len({word for words in wanted for word in words})
    precision = len(common) / len({word for words in predicted for word in words})
    return RougeL(2.0 * precision * recall / (precision + recall + 1e-8), precision, recall, steps)


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. A sentence of blanks only has one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(x: list[str], y: list[str]) -> tuple[set[str], int]:
    """Return the words of the longest common subsequence, and the number of calls that the package makes to find it.

    At a word of `y` that does not occur in `x`, backtracking always moves one column to the left, so that column is
    left out of the table. A word of `x` that does not occur in `y` keeps its row, because there the choice between up
    and left matters.
    """
    vocabulary = set(x)
    columns = [place for place, word in enumerate(y, start=1) if word in vocabulary]
    if not columns:
        return set(), len(y) + 1
    shared = [y[place - 1] for place in columns]
    table = [[0] * (len(shared) + 1)]
    for word in x:
        above, row, left, diagonal = table[-1], [0], 0, 0
        for other, up in zip(shared, above[1:], strict=True):
            left = diagonal + 1 if word == other else (up if up > left else left)
            row.append(left)
            diagonal = up
        table.append(row)
    common: set[str] = set()
    # calls: the first one, and one for each column to the left, those included that are left out of the table
    i, j, steps = len(x), len(shared), len(y) - columns[-1] + 1
    while i and j:
        gap = columns[j - 1] - (columns[j - 2] if j > 1 else 0)
        if x[i - 1] == shared[j - 1]:
            common.add(x[i - 1])
            i, j, steps = i - 1, j - 1, steps + (gap if i > 1 else 1)  # in row 0 the package stops at once
        elif table[i - 1][j] > table[i][j - 1]:
            i, steps = i - 1, steps + 1
        else:
            j, steps = j - 1, steps + gap
    return common, steps


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
