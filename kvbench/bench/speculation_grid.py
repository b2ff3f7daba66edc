"""Figures of ``bench speculation``: medians of rounds, interpolation between gammas, expected times, and tables.

A round with g drafts takes ``g * draft + verify(g) + sampling(g)``, and each token adds its share of the flushes. It
yields ``(1 - a^(g+1)) / (1 - a)`` tokens on average if every draft is accepted with probability a.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.decoding.round_times import Round
from kvbench.profiling.timing import median
from kvbench.results.speculation import expected_tokens
from kvbench.util.table import render_table

#: rounds at the beginning of a measurement that do not count
SKIPPED = 2
#: what distinguishes the points of two rows
AT = ("model", "batch", "context")
#: parts of a measured round in the table: the heading, and the figure
PARTS = {"draft ms": "draft_ms", "verify ms": "verify_ms", "rest ms": "sampling_ms"}
HEAD = ("model", "B", "context", "case", "gamma", "ms", "x", "expected x", *PARTS, "peak GiB", "steps")
Figures = dict[str, Any]
Row = Mapping[str, Any]


def full_rounds(rounds: Iterable[Round], gamma: int) -> list[Round]:
    """Return the rounds in which every row was allowed to accept `gamma` drafts, but not the first :data:`SKIPPED`."""
    return [turn for turn in rounds if all(limit == gamma for limit in turn.drafted)][SKIPPED:]


def block_times(rounds: Sequence[Round], tokens: int) -> list[float]:
    """Divide rounds into blocks of at least `tokens` tokens per row; return the milliseconds per token of each block.

    An unfinished block at the end is left out.
    """
    times: list[float] = []
    seconds = gained = 0.0
    for turn in rounds:
        seconds, gained = seconds + turn.seconds, gained + fmean(turn.emitted)
        if gained >= tokens:
            times.append(1e3 * seconds / gained)
            seconds = gained = 0.0
    return times


def round_parts(rounds: Sequence[Round], gamma: int) -> Figures:
    """Return the times of the parts of rounds in milliseconds.

    Returns:
        ``gamma``; ``rounds``, their number; ``round_ms``, the median of the whole; ``tokens``, their mean number per
        round and row. If the parts were timed: the medians ``draft_ms`` (of one draft), ``verify_ms`` and
        ``sampling_ms`` (the rest of a round), and ``flush_ms``, the mean per token.
    """
    figures: Figures = {
        "gamma": gamma,
        "rounds": len(rounds),
        "round_ms": 1e3 * median([turn.seconds for turn in rounds]),
        "tokens": fmean(fmean(turn.emitted) for turn in rounds),
    }
    each = ((turn.seconds, turn.draft_seconds, turn.verify_seconds, turn.flush_seconds) for turn in rounds)
    timed = [tuple(part for part in turn if part is not None) for turn in each if None not in turn]
    if timed:
        _, drafts, verifications, flushed = zip(*timed, strict=True)
        rest = [whole - draft - verify - flush for whole, draft, verify, flush in timed]
        figures |= {
            "draft_ms": 1e3 * median(drafts) / gamma,
            "verify_ms": 1e3 * median(verifications),
            "sampling_ms": 1e3 * max(median(rest), 0.0),
            "flush_ms": 1e3 * sum(flushed) / (len(timed) * figures["tokens"]),
        }
    return figures


def time_at(scan: Sequence[Row], gamma: int, name: str) -> float:
    """Return the time of the part `name` of a round at `gamma`: measured, interpolated, or that of the nearest gamma.

    `scan` has the figures of each measured gamma (:func:`round_parts`), in ascending order.
    """
    below = [entry for entry in scan if entry["gamma"] <= gamma]
    above = [entry for entry in scan if entry["gamma"] >= gamma]
    if not below or not above:
        return float((below[-1] if below else above[0])[name])
    low, high = below[-1], above[0]
    if low["gamma"] == high["gamma"]:
        return float(low[name])
    share = (gamma - low["gamma"]) / (high["gamma"] - low["gamma"])
    return float(low[name] + share * (high[name] - low[name]))


def flush_ms_per_token(scan: Sequence[Row]) -> float:
    """Return the milliseconds of flushes per token, which do not depend on gamma, averaged over all tokens."""
    tokens = [entry.get("rounds", 1) * entry.get("tokens", 1.0) for entry in scan]
    return float(sum(entry["flush_ms"] * n for entry, n in zip(scan, tokens, strict=True)) / sum(tokens))


def grid_cell(scan: Sequence[Row], acceptance: float, gamma: int) -> Figures | None:
    """Return the expected milliseconds per token at an acceptance and a gamma; None if no parts were timed.

    Returns:
        ``acceptance``, ``gamma``, ``tokens`` (expected per round), ``ms``, and ``times``: ``measured``, or
        ``interpolated`` if no rounds with this gamma were timed.
    """
    timed = [entry for entry in scan if "draft_ms" in entry]
    if not timed:
        return None
    tokens = expected_tokens(acceptance, gamma)
    draft = time_at(timed, gamma, "draft_ms")
    round_ms = gamma * draft + time_at(timed, gamma, "verify_ms") + time_at(timed, gamma, "sampling_ms")
    return {
        "acceptance": acceptance,
        "gamma": gamma,
        "tokens": tokens,
        "ms": round_ms / tokens + flush_ms_per_token(timed),
        "times": "measured" if any(entry["gamma"] == gamma for entry in timed) else "interpolated",
    }


def speed_grid(scan: Sequence[Row], acceptances: Sequence[float], gammas: Sequence[int]) -> list[Figures]:
    """Return the expected milliseconds per token for each acceptance and gamma (:func:`grid_cell`)."""
    cells = [grid_cell(scan, acceptance, gamma) for acceptance in acceptances for gamma in gammas]
    return [one for one in cells if one is not None]


def fastest_gamma(cells: Iterable[Row], acceptance: float) -> int | None:
    """Return the gamma with the shortest expected time per token at an acceptance; None if the grid lacks it."""
    mine = [one for one in cells if one["acceptance"] == acceptance]
    return min(mine, key=lambda one: (one["ms"], one["gamma"]))["gamma"] if mine else None


def plain_ms(rows: Sequence[Row], row: Row) -> float | None:
    """Return the milliseconds per token of plain decoding at the same point as `row`; None if not measured."""
    plain = (other for other in rows if other["case"] == "plain" and all(other[key] == row[key] for key in AT))
    return next(plain, {}).get("ms")


def case_cells(rows: Sequence[Row], row: Row, at: float) -> list[object]:
    """Return a line of the table: the case at its best gamma and the acceptance `at`.

    The speed-up is measured over blocks of tokens; the expected one follows from the times of the parts
    (:func:`grid_cell`).
    """
    base, peak = plain_ms(rows, row), row.get("peak")
    figures: dict[str, Any] = dict.fromkeys(HEAD[4:-2])
    measured = next((one for one in row.get("measured", ()) if one["acceptance"] == at), None)
    if row["case"] == "plain":
        figures |= {"ms": row.get("ms"), "x": 1.0 if "ms" in row else None}
    elif measured is not None:
        place = (at, measured["gamma"])
        expected = next((c["ms"] for c in row["grid"] if (c["acceptance"], c["gamma"]) == place), None)
        figures |= {"gamma": measured["gamma"], "ms": measured["ms"], "x": base / measured["ms"] if base else None}
        figures["expected x"] = base / expected if base and expected else None
        figures |= {heading: measured.get(name) for heading, name in PARTS.items()}
    end = [None if peak is None else peak / 2**30, row.get("stepping") or row.get("message")]
    return [*(row[key] for key in AT), row["case"], *figures.values(), *end]


def grid_table(rows: Sequence[Row], row: Row) -> str:
    """Return the computed grid of a case as a table: a line per acceptance, with the speed-up at each gamma."""
    base = plain_ms(rows, row)
    gammas = sorted({cell["gamma"] for cell in row["grid"]})
    lines = []
    for acceptance in sorted({cell["acceptance"] for cell in row["grid"]}):
        times = {cell["gamma"]: cell["ms"] for cell in row["grid"] if cell["acceptance"] == acceptance}
        measured = [one for one in row["measured"] if one["acceptance"] == acceptance]
        values = [base / times[gamma] if base else times[gamma] for gamma in gammas]
        seen = [f"{base / one['ms'] if base else one['ms']:.2f} (gamma {one['gamma']})" for one in measured]
        lines.append([acceptance, *values, ", ".join(seen) or None])
    unit = "speed-up" if base else "ms a token"
    title = f"{row['model']}, batch {row['batch']}, {row['context']} tokens, {row['case']}: {unit} by gamma, computed"
    return f"{title}\n{render_table(('acceptance', *map(str, gammas), 'measured'), lines, 1)}"


def speculation_tables(rows: Sequence[Row], at: float) -> str:
    """Return all tables as text; the cases are compared at the acceptance `at`."""
    parts = [
        f"acceptance forced to {at:g} (the text is meaningless); x: speed-up over plain captured steps, measured; "
        "expected x: from the times of the parts and the geometric model",
        render_table(HEAD, [case_cells(rows, row, at) for row in rows], HEAD.index("gamma")),
    ]
    parts += [grid_table(rows, row) for row in rows if row["case"] == "quantspec" and row.get("grid")]
    return "\n\n".join(parts)


def case_label(row: Row) -> str:
    """Return the beginning of a line of progress: model, batch, context and case."""
    return f"{row['model']} B{row['batch']} {row['context']} {row['case']}"


def shown_parts(figures: Row) -> str:
    """Return the times of a round as text."""
    names = [name for name in ("draft_ms", "verify_ms", "sampling_ms", "flush_ms", "round_ms") if name in figures]
    return ", ".join(f"{name.removesuffix('_ms')} {figures[name]:.3f}" for name in names) + " ms"
