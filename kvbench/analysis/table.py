"""Tables of an analysis: one line per method with standard errors, and the methods that the analysis distinguishes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvbench.analysis.outcome import Outcome
from kvbench.util.table import size

#: figures of a row that are errors, with their headings
FIGURES = {
    "l1": "L1 error, summed over layers and heads",
    "l1_share": "of its maximum",
    "kl": "KL, nats",
    "output_error": "output error",
    "lost": "dropped attention",
    "coverage_per_token": "attention per exact token, 1e-3",
}
#: figures by which two methods are compared
ERRORS = ("l1", "kl", "output_error")
#: standard errors by which two methods must differ to be told apart
SIGNIFICANT = 2.0


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """Return the mean of ``[N]`` numbers and its standard error; the error is NaN for fewer than two numbers."""
    error = float(numbers.std(ddof=1) / len(numbers) ** 0.5) if len(numbers) > 1 else float("nan")
    return float(numbers.mean()), error


def analysis_markdown(outcome: Outcome) -> str:
    """Format an analysis as a markdown table: a line per method, with means over prompts and their standard errors."""
    header = ["", *FIGURES.values(), "KV bytes"]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    for setting in outcome.settings:
        cells = [_figure_cell(name, *mean_and_error(outcome.figures(setting, name))) for name in FIGURES]
        cells.append(size(float(outcome.figures(setting, "kv_bytes").mean())))
        lines.append("| " + " | ".join([setting, *cells]) + " |")
    return "\n".join(lines)


def told_apart(outcome: Outcome, names: Sequence[str] = ERRORS) -> list[tuple[str, str, float]]:
    """Compare each pair of methods over the same prompts, in units of the standard error of their difference.

    For each figure (:meth:`Outcome.row`), the difference of the two methods is taken prompt by prompt, and its mean is
    divided by its standard error, which requires at least two prompts. A pair counts as distinguished if the absolute
    value of this quotient exceeds :data:`SIGNIFICANT` for at least one figure.

    Returns:
        For each pair of methods: the two settings, and the largest absolute quotient over the figures. It is 0 if the
        two do not differ in any figure, and infinite if they differ by the same amount on every prompt.
    """
    pairs = []
    for first, second in combinations(outcome.settings, 2):
        scores = []
        for name in names:
            difference, error = mean_and_error(outcome.figures(first, name) - outcome.figures(second, name))
            scores.append(abs(difference) / error if error else float("inf") if difference else 0.0)
        pairs.append((first, second, max(scores)))
    return pairs


def findings(outcome: Outcome) -> str:
    """Summarize which pairs of methods the analysis distinguishes: their number, and the names of all other pairs."""
    pairs = told_apart(outcome)
    alike = [f"{a} and {b}" for a, b, score in pairs if not score > SIGNIFICANT]
    count = len(outcome.prompts)
    line = (
        f"n = {count} prompts. {len(pairs) - len(alike)} of {len(pairs)} pairs of methods differ by more than "
        f"{SIGNIFICANT:g} standard errors of their paired difference in at least one of {', '.join(ERRORS)}."
    )
    return line + (f" Pairs without such a difference: {'; '.join(alike)}." if alike else "")


def page(outcome: Outcome, command: str) -> str:
    """Return the content of ``table.md``: the command, the table of methods, and the text of :func:`findings`."""
    return f"`{command}`\n\n{analysis_markdown(outcome)}\n\n{findings(outcome)}\n"


def _figure_cell(name: str, average: float, error: float) -> str:
    scale = {"l1_share": 100.0, "lost": 100.0, "output_error": 100.0, "coverage_per_token": 1000.0}.get(name, 1.0)
    percent = " %" if scale == 100.0 else ""
    return f"{average * scale:.3g}{percent} ±{error * scale:.2g}"
