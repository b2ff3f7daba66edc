"""The tables of :mod:`experiments.quantspec.acceptance`: rates with errors over prompts, paired differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kvbench.results.speculation import ratio_error

Record = Mapping[str, Any]


def fold_speculation(path: Path, drafts: Sequence[str], where: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the tables as text, and their cells.

    Args:
        path: lines of records.
        drafts: names in the order of the rows; the first one is what the others are compared with.
        where: model, dtype and sampling, for the heading.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if any(r["data"] == "books" and r["prompt"].startswith("python@") for r in records):
        note = " No folder of books was named: `books` are texts that come with Python."
    else:
        note = " The books are PG-19-like: whole, published before 1919, not PG-19's own transcripts."
    settings = sorted({(r["data"], r["nominal"]) for r in records})
    lines = [f"# Acceptance by draft and gamma: {where}", "", HEAD + note, ""]
    table = []
    for data, length in settings:
        mine = [r for r in records if (r["data"], r["nominal"]) == (data, length) and r["drafted"]]
        cells = by_cell(mine, drafts)
        table += [{"data": data, "length": length, **cell} for cell in cells]
        count = max(cell["prompts"] for cell in cells)
        lines += [f"## {data}, {length} tokens, {count} prompts", "", *rates(cells), "", *differences(cells), ""]
    return "\n".join(lines), table


HEAD = (
    "Share of drafted tokens that were accepted, over all prompts, ± standard error clustered by prompt; below it, the "
    "tokens per round. Sparse drafts keep a quarter of the context (MagicDec's settings) and, like the other methods, "
    "draft for a target in full precision; QuantSpec drafts for its own 8 bits."
)


def by_cell(records: Sequence[Record], drafts: Sequence[str]) -> list[dict[str, Any]]:
    """Return one entry per draft and gamma: rate, error, tokens per round, the first draft's paired difference."""
    by_draft = {}
    for record in records:
        by_draft.setdefault((record["draft"], record["gamma"]), {})[record["prompt"]] = record
    cells = []
    for draft in drafts:
        for gamma in sorted({g for d, g in by_draft if d == draft}):
            mine, first = by_draft[draft, gamma], by_draft.get((drafts[0], gamma), {})
            accepted, drafted = ([r[key] for r in mine.values()] for key in ("accepted", "drafted"))
            pairs = [rate(first[p]) - rate(mine[p]) for p in mine if p in first] if draft != drafts[0] else []
            cells.append(
                {
                    "draft": draft,
                    "gamma": gamma,
                    "acceptance_rate": sum(accepted) / sum(drafted),
                    "stderr": ratio_error(accepted, drafted),
                    "tokens_per_round": sum(r["tokens"] for r in mine.values())
                    / sum(r["rounds"] for r in mine.values()),
                    "drafted": sum(drafted),
                    "prompts": len(mine),
                    "seconds_per_token": sum(r["seconds"] for r in mine.values())
                    / sum(r["tokens"] for r in mine.values()),
                    "quantspec_minus_this": fmean(pairs) if pairs else None,
                    "quantspec_minus_this_stderr": stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
                }
            )
    return cells


def rate(record: Record) -> float:
    """Return the acceptance rate of one answer."""
    return record["accepted"] / record["drafted"]


def rates(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table with drafts as rows and gammas as columns."""
    gammas = sorted({cell["gamma"] for cell in cells})
    lines = ["| draft | " + " | ".join(f"γ = {g}" for g in gammas) + " |", "|:--|" + "--:|" * len(gammas)]
    for draft in dict.fromkeys(cell["draft"] for cell in cells):
        row = {cell["gamma"]: cell for cell in cells if cell["draft"] == draft}
        lines.append(f"| {draft} | " + " | ".join(_rate(row.get(g)) for g in gammas) + " |")
    return lines


def differences(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lead of the first draft's rate over each other's, prompt by prompt, in points."""
    first = cells[0]["draft"]
    gammas = sorted({cell["gamma"] for cell in cells})
    lines = [f"Acceptance rate of {first} minus that of the draft in each row (mean over prompts, in points):", ""]
    lines += ["| draft | " + " | ".join(f"γ = {g}" for g in gammas) + " |", "|:--|" + "--:|" * len(gammas)]
    for draft in dict.fromkeys(cell["draft"] for cell in cells if cell["draft"] != first):
        row = {cell["gamma"]: cell for cell in cells if cell["draft"] == draft}
        lines.append(f"| {draft} | " + " | ".join(_difference(row.get(g)) for g in gammas) + " |")
    return lines


def _rate(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    error = "" if cell["stderr"] is None else f" ± {100 * cell['stderr']:.1f}"
    return f"{100 * cell['acceptance_rate']:.1f}{error}<br>{cell['tokens_per_round']:.2f}"


def _difference(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["quantspec_minus_this"] is None:
        return "-"
    error = cell["quantspec_minus_this_stderr"]
    return f"{100 * cell['quantspec_minus_this']:+.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
