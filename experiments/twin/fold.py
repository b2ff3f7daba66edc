"""The tables of the twin from its rows: means over windows, their standard errors, and differences in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from experiments.twin.measure import FORMATS

Row = Mapping[str, Any]
#: bounds that the first table is held to: of fp16 beside fp16, of a relative difference, and of the divergence of both
#: engines with a format, relative to that of the format
FP16, RELATIVE, SHARE = 1e-5, 0.1, 0.25


def column(rows: Sequence[Row], form: str, name: str) -> list[float]:
    """Return a column of a format, one number per window."""
    return [row["formats"][form][name] for row in rows]


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some numbers, and its standard error (0 for a single number)."""
    return fmean(numbers), stdev(numbers) / sqrt(len(numbers)) if len(numbers) > 1 else 0.0


def summary(rows: Sequence[Row], form: str, part: str) -> dict[str, float | bool]:
    """Return how far a column of kvbench is from llama.cpp's, in pairs of windows."""
    theirs, ours = column(rows, form, "llamacpp"), column(rows, form, part)
    gap, error = mean_and_error([x - y for x, y in zip(ours, theirs, strict=True)])
    relative = gap / fmean(theirs)
    share = fmean(column(rows, form, f"between_{part}")) / fmean(theirs)
    return {"gap": gap, "error": error, "relative": relative, "share": share,
            "met": abs(relative) <= RELATIVE or abs(gap) <= 2 * error}  # fmt: skip


def number(mean: float, error: float | None = None) -> str:
    """Return a figure of a table, with its standard error."""
    return f"{mean:.3g}" if error is None else f"{mean:.3g} ± {error:.1g}"


def lines_of(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] + ["--:"] * (len(head) - 1), *lines)]


def beside(rows: Sequence[Row], parts: Sequence[str]) -> list[str]:
    """Return the table of llama.cpp beside kvbench on float32 weights."""
    head = ["cache", "llama.cpp"]
    for part in parts:
        head += [f"kvbench, {part}", "difference", "between both, of llama.cpp's"]
    lines = []
    for form in FORMATS:
        cells = [form, number(*mean_and_error(column(rows, form, "llamacpp")))]
        for part in parts:
            said = summary(rows, form, part)
            cells += [
                number(*mean_and_error(column(rows, form, part))),
                f"{100 * said['relative']:+.0f} %, {said['gap'] / said['error'] if said['error'] else 0:+.1f} errors",
                f"{said['share']:.2f}",
            ]
        lines.append(cells)
    return lines_of(head, lines)


def itself(rows: Sequence[Row], other: str) -> list[str]:
    """Return the table of llama.cpp beside itself on another file of weights, which `other` describes."""
    head = ["cache", "the file", other, "between both", "between both, of the file's"]
    lines = []
    for form in FORMATS:
        own, rival, between = (column(rows, form, name) for name in ("own", "other", "between"))
        cells = (number(*mean_and_error(numbers)) for numbers in (own, rival, between))
        lines.append([form, *cells, f"{fmean(between) / fmean(own):.2f}"])
    return lines_of(head, lines)


def verdicts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return which of the bounds hold: of fp16, and for each format of the column ``engine``."""
    by_format = {form: summary(rows, form, "engine") for form in FORMATS}
    return {
        "f16": {"largest": max(row["f16"] for row in rows), "met": max(row["f16"] for row in rows) <= FP16},
        "difference": {form: said["met"] for form, said in by_format.items()},
        "share": {form: said["share"] <= SHARE for form, said in by_format.items()},
    }
