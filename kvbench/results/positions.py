"""Curves over the tokens of an answer: how far predictions are from fp16's, and the share of answers still equal.

Two kinds of runs have them. Rows of ``dataset=fidelity`` hold figures of each position of fp16's own answer. Ordinary
rows hold the answer that each run gave by itself; two runs on the same samples show where these answers part, and whose
scores changed. Positions of one answer depend on each other, so every interval is over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.metrics import intervals
from kvbench.results.aggregate import mean_error
from kvbench.results.fidelity_fold import DRAWS, PERCENTILE_DRAWS, comparisons, first_differences, same_top
from kvbench.results.samples import Row

#: measures of a curve with their headings, in the order of tables and plots
HEADINGS = {
    "kld_mean": "KL mean, nats",
    "kld_p99": "KL 99 %, nats",
    "other_top": "other top",
    "top_mass": "top-20 mass",
    "still_equal": "still equal",
}


@dataclass(frozen=True)
class Stretch:
    """Figures of a stretch of an answer's tokens.

    Args:
        first, last: numbers of tokens decoded before the positions of the stretch. For answers that part, both are
            the number of tokens after which they are compared.
        n: number of positions; for answers that part, of answers that are equal so far and go on.
        samples: number of samples with such positions, or of compared answers.
        figures: value and both ends of its 95 % interval, by measure (:data:`HEADINGS`); an end may be None.
    """

    first: int
    last: int
    n: int
    samples: int
    figures: dict[str, tuple[float, float | None, float | None]]


def fidelity_stretches(rows: Sequence[Row], width: int | None = None) -> list[Stretch]:
    """Average the figures of rows of ``dataset=fidelity`` over stretches of the tokens since the exact prefill.

    The position after the k-th given token belongs to the stretch with k. In a simulated pass, k counts from 0.

    Args:
        width: number of tokens of a stretch; None: 1, 2 to 3, 4 to 7, and so on.
    """
    import numpy as np

    from kvbench.metrics.fidelity import position_bins

    rows = comparisons(rows)
    if not rows:
        return []
    begin = 1 if rows[-1]["fidelity"]["mode"] == "decode" else 0
    by_measure = {
        "kld_mean": [np.asarray(row["fidelity"]["kld"]) for row in rows],
        "other_top": [1.0 - same_top(row) for row in rows],
    }
    if all("top_mass" in row["fidelity"] for row in rows):
        by_measure["top_mass"] = [np.asarray(row["fidelity"]["top_mass"]) for row in rows]
    last = max(map(len, by_measure["kld_mean"])) - 1 + begin
    stretches = []
    for first, end in position_bins(last, width):
        part = slice(max(0, first - begin), max(0, end - begin))
        inside = {name: [kept for x in arrays if len(kept := x[part])] for name, arrays in by_measure.items()}
        klds = inside["kld_mean"]
        if klds:
            figures = {name: _drawn_figure(groups) for name, groups in inside.items()}
            figures["kld_p99"] = _drawn_figure(klds, 99.0)
            stretches.append(Stretch(max(first, begin), min(end - 1, last), sum(map(len, klds)), len(klds), figures))
    return stretches


def _drawn_figure(groups: Sequence[Any], level: float | None = None) -> tuple[float, float | None, float | None]:
    """Return a mean or a percentile over all values, and its interval by drawing whole samples."""
    import numpy as np

    from kvbench.metrics.fidelity import bootstrap

    values = np.concatenate(groups)
    value = float(values.mean() if level is None else np.percentile(values, level))
    if len(groups) < 2:
        return value, None, None
    return value, *bootstrap(groups, level, draws=DRAWS if level is None else PERCENTILE_DRAWS)


def survival(parts: Sequence[Mapping[str, Any]], width: int | None = None) -> list[Stretch]:
    """Return the share of answers whose first k tokens equal those of fp16's answer, for growing k.

    Args:
        parts: results of :func:`kvbench.results.fidelity_fold.first_differences`, or ``left`` of rows of fidelity. An
            answer that equals fp16's to its end counts as equal from there on.
        width: k grows by so many tokens; None: 1, 2, 4, 8, and so on. At the last k, all answers have ended or parted.
    """
    # where one answer ends and the other goes on, they part after the last token that both have
    longest = max((part["compared"] + (part["at"] == part["compared"]) for part in parts), default=0)
    marks = list(range(width, longest, width)) if width else [2**k for k in range(longest.bit_length())]
    stretches = []
    for mark in sorted({*marks, longest} - {0}):
        equal = [part for part in parts if part["at"] is None or part["at"] >= mark]
        going = sum(part["compared"] > mark for part in equal)
        share = len(equal) / len(parts), *intervals.wilson(len(equal), len(parts))
        stretches.append(Stretch(mark, mark, going, len(parts), {"still_equal": share}))
    return stretches


def score_changes(rows: Mapping[str, Row], others: Mapping[str, Row], names: Sequence[str]) -> dict[str, Any] | None:
    """Count the samples whose score in `others` is another than in `rows`; None if no sample has a score.

    The arguments are those of :func:`kvbench.results.fidelity_fold.first_differences`.

    Returns:
        ``lower`` and ``higher``, the numbers of samples whose score fell and rose; ``mean``, the mean difference, and
        its paired standard error ``stderr``; ``p``, by the exact two-sided sign test (McNemar's test if scores are 0
        and 1); ``n``, the number of samples with both scores.
    """
    from kvbench.metrics.fidelity import mcnemar

    pairs = [(rows[name]["scores"].get("score"), others[name]["scores"].get("score")) for name in names]
    differences = [after - before for before, after in pairs if before is not None and after is not None]
    if not differences:
        return None
    lower, higher = sum(x < -1e-9 for x in differences), sum(x > 1e-9 for x in differences)
    mean, error = mean_error(differences)
    p = mcnemar(lower, higher)
    return {"lower": lower, "higher": higher, "mean": mean, "stderr": error, "p": p, "n": len(differences)}


@dataclass(frozen=True)
class Curve:
    """Curve of one task of one run.

    Args:
        run: heading of the run.
        task: ``task`` or ``task@length``.
        changes: result of :func:`score_changes`; None for rows of fidelity, and without scores.
    """

    run: str
    task: str
    stretches: list[Stretch]
    changes: dict[str, Any] | None = None


def answer_curve(
    run: str, task: str, rows: Mapping[str, Row], others: Mapping[str, Row], width: int | None = None
) -> Curve | None:
    """Return the curve of freely generated answers in `others` against those in `rows`; None without common answers."""
    names = [name for name in others if name in rows]
    parts = first_differences(rows, others, names)
    return Curve(run, task, survival(parts, width), score_changes(rows, others, names)) if parts else None
