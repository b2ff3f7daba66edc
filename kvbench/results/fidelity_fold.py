"""Fidelity figures of `metrics.json`, averaged from a run's rows, and comparison of two runs, prompt by prompt.

Positions of one prompt depend on each other, so all intervals are from a bootstrap that draws whole prompts. For two
runs the same prompts are drawn, so that the interval of their difference is a paired one. The figures of single
positions are those of :mod:`kvbench.metrics.fidelity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvbench.results.samples import Row

if TYPE_CHECKING:
    from kvbench.metrics.fidelity import Positions

#: number of draws for means, and for percentiles, which take longer
DRAWS, PERCENTILE_DRAWS = 10_000, 1_000

#: the measures of a pair of runs, and the percentiles that some of them are
MEASURES = ("kld_mean", "kld_median", "kld_p99_9", "same_top")
_LEVELS = {"kld_median": 50.0, "kld_p99_9": 99.9}


def fold_fidelity_rows(group: Sequence[Row]) -> dict[str, Any] | None:
    """Fold the rows of one task into the fields of :class:`kvbench.results.record_scores.Fidelity`.

    The result is None if the rows are results of another kind, or no position was decoded.
    """
    rows = comparisons(group)
    if not rows:
        return None
    import numpy as np

    from kvbench.metrics import fidelity

    positions = join_positions(rows)
    whole = fidelity.statistics(positions)
    klds = [row["fidelity"]["kld"] for row in rows]
    begin = 1 if rows[-1]["fidelity"]["mode"] == "decode" else 0
    index = [np.arange(begin, begin + len(kld)) for kld in klds]
    rise = fidelity.slope(index, klds)
    firsts = [first["kld"] for row in group if (first := (row.get("fidelity") or {}).get("first"))]
    last = rows[-1]["fidelity"]
    return {
        "kld": {
            "mean": whole["kld_mean"],
            **_interval(drawn(rows, "kld_mean"), len(rows)),
            "of_prompts": fmean(map(fmean, klds)),
            "median": whole["kld_median"],
            **{f"p{level}": whole[f"kld_p{level}"] for level in (90, 95, 99)},
            "p99_9": whole["kld_p99.9"],
            **_interval(drawn(rows, "kld_p99_9"), len(rows), "p99_9_"),
            "max": whole["kld_max"],
            "min": whole["kld_min"],
            "rms": float(np.sqrt(np.square(positions.kld).mean())),
        },
        "change": {
            "mean": whole["change_mean"],
            **_interval(fidelity.drawn([row["fidelity"]["change"] for row in rows], draws=DRAWS), len(rows)),
            "rms": whole["change_rms"],
        },
        "same_top": {"share": whole["same_top"], **_interval(drawn(rows, "same_top"), len(rows))},
        **({} if positions.top_mass is None else {"top_mass": float(positions.top_mass.mean())}),
        "nll_base": whole["nll_base"],
        "nll": whole["nll"],
        "positions": len(positions.kld),
        "prompts": len(rows),
        "first_kld": fmean(firsts) if firsts else None,
        "bins": [dict(part) for part in fidelity.by_position(positions, np.concatenate(index))],
        "growth": None
        if len(rows) < 2 or math.isnan(rise[0]) or math.isnan(rise[1])
        else {name: 1000 * x for name, x in zip(("per_1000", "low", "high"), rise, strict=True)},
        "left": departure([row["fidelity"]["left"] for row in group if (row.get("fidelity") or {}).get("left")]),
        "layers": _layers([row["fidelity"]["layers"] for row in rows if row["fidelity"].get("layers")]),
        **{name: last[name] for name in ("mode", "statistics", "answers", "reference")},
    }


def comparisons(group: Sequence[Row]) -> list[Row]:
    """Return the rows that compare predictions at one position or more, ordered by the ids of their samples."""
    rows = [row for row in group if row.get("fidelity") and row["fidelity"]["kld"]]
    return sorted(rows, key=lambda row: str(row["id"]))


def join_positions(rows: Sequence[Row]) -> Positions:
    """Return all positions of several rows, in their order."""
    import numpy as np

    from kvbench.metrics.fidelity import Positions

    parts = [row["fidelity"] for row in rows]
    names = ["kld", "change", "nll_base", "nll"]
    if all("top_mass" in part for part in parts):
        names.append("top_mass")
    numbers = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return Positions(same_top=np.concatenate([same_top(row) for row in rows]), **numbers)


def same_top(row: Row) -> Any:
    """Return for each position of a row whether both caches found the same token most probable, bool ``[n]``."""
    import numpy as np

    part = row["fidelity"]
    same = np.ones(len(part["kld"]), dtype=bool)
    # positions are counted from the prompt's last token, whose prediction is not among them
    same[np.asarray(part["other_top"], dtype=int) - (part["mode"] == "decode")] = False
    return same


def drawn(rows: Sequence[Row], measure: str) -> Any:
    """Return the values of a measure, one per draw of a bootstrap over prompts.

    `measure` is one of :data:`MEASURES`; `rows` are from :func:`comparisons`. Calls with equally many rows draw the
    same prompts.
    """
    from kvbench.metrics import fidelity

    if measure == "same_top":
        return fidelity.drawn([same_top(row) for row in rows], draws=DRAWS)
    klds = [row["fidelity"]["kld"] for row in rows]
    if measure == "kld_mean":
        return fidelity.drawn(klds, draws=DRAWS)
    return fidelity.drawn(klds, _LEVELS[measure], draws=PERCENTILE_DRAWS)


def value(rows: Sequence[Row], measure: str) -> float:
    """Return a measure (:data:`MEASURES`) over all positions of rows."""
    from kvbench.metrics import fidelity

    positions = join_positions(rows)
    if measure == "same_top":
        return float(positions.same_top.mean())
    return fidelity.statistics(positions)["kld_p99.9" if measure == "kld_p99_9" else measure]


def pair_fidelity(a: Sequence[Row], b: Sequence[Row]) -> dict[str, dict[str, float]] | None:
    """Compare rows of one task from two runs, over the samples that both have.

    Returns:
        For each of :data:`MEASURES` the values ``a`` and ``b``, their difference ``diff``, b - a, both ends ``low`` and
        ``high`` of its paired 95 % interval, and the number ``n`` of prompts; None without common samples.
    """
    import numpy as np

    own, other = ({row["id"]: row for row in comparisons(rows)} for rows in (a, b))
    common = [name for name in own if name in other and _length(own[name]) == _length(other[name])]
    if not common:
        return None
    rows_a, rows_b = ([rows[name] for name in common] for rows in (own, other))
    figures = {}
    for measure in MEASURES:
        low, high = np.percentile(drawn(rows_b, measure) - drawn(rows_a, measure), (2.5, 97.5))
        values = value(rows_a, measure), value(rows_b, measure)
        figures[measure] = {
            "a": values[0],
            "b": values[1],
            "diff": values[1] - values[0],
            "low": float(low),
            "high": float(high),
            "n": len(common),
        }
    return figures


def departure(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarize where greedy answers first differ from fp16's (:class:`kvbench.results.record_scores.Departure`).

    Of each answer, ``at`` is the first differing index or None, ``compared`` the number of compared tokens, and
    ``gap``, if known, the gap between fp16's first and second choice at that index.
    """
    if not parts:
        return None
    places = [math.inf if part["at"] is None else part["at"] for part in parts]
    middle = median(places)
    gaps = [part["gap"] for part in parts if part.get("gap") is not None]
    return {
        "n": len(parts),
        "never": sum(map(math.isinf, places)) / len(parts),
        "median": None if math.isinf(middle) or math.isnan(middle) else float(middle),
        "compared": float(median(part["compared"] for part in parts)),
        "gap": median(gaps) if gaps else None,
    }


def answers_left(rows: Mapping[str, Row], others: Mapping[str, Row], names: Sequence[str]) -> dict[str, Any] | None:
    """Summarize where freely generated answers of one run first differ from another's; None without answers.

    The arguments are those of :func:`first_differences`.
    """
    return departure(first_differences(rows, others, names))


def first_differences(
    rows: Mapping[str, Row], others: Mapping[str, Row], names: Sequence[str]
) -> list[dict[str, int | None]]:
    """Compare the answers in `others` with those in `rows`, token by token; samples without answers are left out.

    Both are rows by sample id; `names` are ids that both have. Of each answer, ``at`` is the number of tokens before
    the first different one, None if there is none, and ``compared`` the number of tokens that both answers have.
    """
    from kvbench.metrics.fidelity import first_difference

    parts: list[dict[str, int | None]] = []
    for name in names:
        tokens = rows[name].get("tokens") or [], others[name].get("tokens") or []
        if tokens[0] or tokens[1]:
            place = first_difference(*tokens)
            parts.append({"at": place.first, "compared": place.compared})
    return parts


def flips_of(rows: Mapping[str, Row], others: Mapping[str, Row], names: Sequence[str]) -> dict[str, Any] | None:
    """Count the answers whose correctness differs between two runs; an answer is correct if its score is 1.

    The arguments are those of :func:`answers_left`. The result is that of :func:`kvbench.metrics.fidelity.flips`; None
    if no sample has a score.
    """
    from kvbench.metrics.fidelity import flips

    score: Callable[[Row], Any] = lambda row: row["scores"].get("score")  # noqa: E731
    scored = [name for name in names if score(rows[name]) is not None and score(others[name]) is not None]
    if not scored:
        return None
    return flips(*([score(part[name]) >= 1 - 1e-9 for name in scored] for part in (rows, others)))


def _layers(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any] | None:
    parts = [part for part in parts if part["own"]]
    if not parts:
        return None
    means = {name: [fmean(errors) for errors in zip(*(p[name] for p in parts), strict=True)] for name in parts[0]}
    return {**means, "worst": means["own"].index(max(means["own"])), "n": len(parts)}


def _interval(values: Any, rows: int, prefix: str = "") -> dict[str, float]:
    import numpy as np

    if rows < 2:
        return {}  # a single prompt has no interval
    low, high = np.percentile(values, (2.5, 97.5))
    return {f"{prefix}low": float(low), f"{prefix}high": float(high)}


def _length(row: Row) -> int:
    return len(row["fidelity"]["kld"])
