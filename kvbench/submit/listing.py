"""All rows of a leaderboard: the check of each and of all together, and their table in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.metrics import intervals
from kvbench.results import aggregate
from kvbench.results.board import (
    MEASURES,
    BoardDifference,
    BoardFigure,
    BoardRow,
    RowError,
    differences,
    disagreement,
    from_exact,
    row_status,
)
from kvbench.results.board_file import read_row, row_files
from kvbench.submit.check import check_bytes, row_method, unpredicted

README = "README.md"
ABOUT = """# Leaderboard

Runs of kvbench, each a JSON file in this folder that anybody can add ([how](../docs/leaderboard.md)). This page is
written by `python -m kvbench.submit --write`; `python -m kvbench.submit --check` checks all rows.

A row is checked by its schema, its digest, the id of its run (a hash of all settings), figures that follow from its
samples, and **bytes recomputed from its settings**. None of this shows that the answers were real: a row is
*self-reported* until somebody else's run of the same settings agrees with it within its error. Δ is the paired
difference from the fp16 row of the same samples. Bits are per element of keys and values at the lengths of the samples.
"""
HEAD = ("setting", "value (95 %)", "n", "Δ fp16 (95 %)", "bits", "bytes a token", "device", "by", "status", "row")
#: titles of measures
TITLES = {"score": "score", "perplexity": "perplexity", "kl": "KL divergence from fp16, nats (mean over samples)"}
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#|~!&$])")


@dataclass(frozen=True)
class Listing:
    """The rows of a folder that pass the check, and a message for each that does not."""

    rows: Sequence[BoardRow]
    problems: Sequence[str]


def read_listing(folder: Path) -> Listing:
    """Read and check all rows of a folder."""
    rows, problems = list[BoardRow](), list[str]()
    for path in row_files(folder):
        try:
            row = read_row(path)
            check_bytes(row)
        except RowError as error:
            problems.append(str(error))
        else:
            rows.append(row)
    return Listing(rows, [*problems, *_together(rows)])


def _together(rows: Sequence[BoardRow]) -> Iterator[str]:
    """Yield what is wrong with rows beside others: one run of one person twice, reruns that do not agree."""
    seen: dict[tuple[str, str], BoardRow] = {}
    for row in rows:
        other = seen.setdefault((row.run, row.who), row)
        if other is not row:
            yield f"{row.file}: {row.who} has this run already, in {other.file}; keep one"
    by_digest = {row.digest: row for row in rows}
    for row in rows:
        if row.again is None:
            continue
        if row.again not in by_digest:
            yield f"{row.file}: repeats the row {row.again[:8]}, which is not here"
        elif problem := disagreement(row, by_digest[row.again]):
            yield f"{row.file}: {problem}"


def agreement(row: BoardRow, other: BoardRow) -> str:
    """Return how a row compares with the one that it reproduces."""
    if row.outputs == other.outputs:
        return "all answers are the same"
    parts = differences(row, other)
    return ", ".join(f"{part.key} {part.value:+.3g} ± {part.stderr or 0:.2g} (n={part.n})" for part in parts)


def markdown_escape(text: str) -> str:
    """Return a text that Markdown and HTML show as it is."""
    return _MARKUP.sub(r"\\\1", text).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def listing_markdown(listing: Listing) -> str:
    """Return the page of a leaderboard: a table for each group of comparable rows."""
    groups: dict[str, list[BoardRow]] = {}
    for row in listing.rows:
        groups.setdefault(row.group, []).append(row)
    lines = [ABOUT]
    for rows in sorted(groups.values(), key=lambda rows: (rows[0].model, rows[0].data, rows[0].measure, rows[0].run)):
        lines += _group_lines(listing, rows)
    return "\n".join(lines)


def _group_lines(listing: Listing, rows: list[BoardRow]) -> Iterator[str]:
    first, title = rows[0], TITLES[rows[0].measure]
    keys = ", ".join(first.samples)
    yield f"## {markdown_escape(f'{first.model}, {first.data}')}\n"
    better = "more" if MEASURES[first.measure] else "less"
    yield (
        f"{title[0].upper()}{title[1:]}: {better} is better. "
        f"Tasks: {markdown_escape(keys)}. Digest of the model: `{first.model_digest[:16]}`.\n"
    )
    yield f"| {' | '.join(HEAD)} |"
    yield f"|:--|{'--:|' * 5}:--|:--|:--|:--|"
    for row in sorted(rows, key=lambda row: (-row.bytes.bits, row.name, row.digest)):
        pair = from_exact(row, rows)
        bits = f"{row.bytes.bits:.2f}" + (" measured" if unpredicted(row_method(row)) else "")
        who = markdown_escape(row.who)
        cells = (
            markdown_escape(row.name),
            with_interval(row, row.mean),
            f"{row.mean.n:,}",
            "-" if pair is None else difference_text(row, pair),
            bits,
            f"{row.bytes.per_token:,.0f}",
            markdown_escape(row.device),
            f"[{who}]({row.link})" if row.link else who,
            markdown_escape(row_status(row, listing.rows)),
            f"[{row.digest[:8]}]({row.file})",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def with_interval(row: BoardRow, one: BoardFigure) -> str:
    """Return a figure with its 95 % interval."""
    if row.measure == "score":
        ends = aggregate.interval_of({"score": one.value, "stderr": one.stderr, "n": one.n})
    elif row.measure == "kl":
        ends = intervals.of_moments(one.value, one.stderr, one.n)
    else:  # that of the mean likelihood, of which a perplexity is the exponential
        error = one.stderr and one.stderr / one.value
        ends = intervals.of_moments(math.log(one.value), error, one.n)
        ends = ends and (math.exp(ends[0]), math.exp(ends[1]))
    return _shown(one.value, ends)


def difference_text(row: BoardRow, pair: BoardDifference) -> str:
    """Return the difference of a row from fp16 with its 95 % interval."""
    score = row.mean.value if row.measure == "score" else None
    return _shown(
        pair.value, aggregate.pair_interval(score, {"diff": pair.value, "stderr": pair.stderr, "n": pair.n}), "+"
    )


def _shown(value: float, ends: tuple[float, float] | None, sign: str = "") -> str:
    shown = f"{value:{sign}.4g}"
    return shown if ends is None else f"{shown} ({ends[0]:{sign}.3g} to {ends[1]:{sign}.3g})"
