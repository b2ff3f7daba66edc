"""The tables of acceptance (rates with errors over prompts, paired differences) and of equality; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.stored import markdown_table
from kvbench.results.speculation import ratio_error

Record = Mapping[str, Any]


def fold_speculation(path: Path, drafts: Sequence[str], where: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the tables of a file of records as text, and their cells.

    The first of `drafts` is what the others are compared with; `where` is what the heading says.
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
    return _by_gamma(cells, dict.fromkeys(cell["draft"] for cell in cells), _rate)


def differences(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lead of the first draft's rate over each other's, prompt by prompt, in points."""
    first, *others = dict.fromkeys(cell["draft"] for cell in cells)
    lines = [f"Acceptance rate of {first} minus that of the draft in each row (mean over prompts, in points):", ""]
    return [*lines, *_by_gamma(cells, others, _difference)]


def _by_gamma(
    cells: Sequence[Mapping[str, Any]], drafts: Iterable[str], shown: Callable[[Mapping[str, Any] | None], str]
) -> list[str]:
    """Return a table with these drafts as rows and gammas as columns."""
    gammas = sorted({cell["gamma"] for cell in cells})
    by_place = {(cell["draft"], cell["gamma"]): cell for cell in cells}
    body = ([draft, *(shown(by_place.get((draft, gamma))) for gamma in gammas)] for draft in drafts)
    return markdown_table(["draft", *(f"γ = {gamma}" for gamma in gammas)], body)


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


def equality_figures(records: Sequence[Mapping[str, Any]], tie: float) -> dict[str, Any]:
    """Return what the runs of a comparison come to: a row per gamma, and what holds for all runs.

    A smaller difference between the two best logits than `tie` is one.
    """
    rows = []
    for gamma in sorted({record["gamma"] for record in records}):
        mine = [record for record in records if record["gamma"] == gamma]
        wrong = [record for record in mine if not record["equal"]]
        tied = sum(record["gap_there"] < tie for record in wrong)
        rows.append(
            {
                "gamma": gamma,
                "prompts": len(mine),
                "equal": len(mine) - len(wrong),
                "at_a_tie": tied,
                "elsewhere": len(wrong) - tied,
                "flushes": sum(len(record["flushes"]) for record in mine),
                "accepted": sum(r["accepted"] for r in mine) / sum(r["drafted"] for r in mine),
            }
        )
    return {
        "rows": rows,
        "refused": sum(record["drafted"] - record["accepted"] for record in records),
        "smallest_gap": min(record["smallest_gap"] for record in records),
        "tie": tie,
        "ties": sorted({(record["prompt"], i, gap) for record in records for i, gap in record["ties"]}),
    }


def equality_rows(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table: a line per gamma."""
    head = ["gamma", "prompts", "equal", "differ at a tie", "differ elsewhere", "flushes", "accepted"]
    counts = ("gamma", "prompts", "equal", "at_a_tie", "elsewhere", "flushes")
    return markdown_table(
        head, ([*(str(row[key]) for key in counts), f"{row['accepted']:.3f}"] for row in entries), "r"
    )


def equality_text(content: Mapping[str, Any]) -> list[str]:
    """Return the table and the sentences below it."""
    runs = sum(row["prompts"] for row in content["rows"])
    lines = [
        *equality_rows(content["rows"]),
        "",
        f"{runs} runs; {content['refused']} drafts were rejected in total.",
        "",
    ]
    lines += [f"Smallest gap between the two best logits: {content['smallest_gap']:.2e}."]
    lines += [f"Near-ties (below {content['tie']:g}) of the target alone: {len(content['ties'])}."]
    return [*lines, *(f"- {prompt}, token {place}: {gap:.2e}" for prompt, place, gap in content["ties"])]
