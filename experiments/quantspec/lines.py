"""The table of :mod:`experiments.quantspec.equality`, and the figures behind it; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def equality_figures(records: Sequence[Mapping[str, Any]], tie: float) -> dict[str, Any]:
    """Return what the runs of a comparison come to: a row per gamma, and what holds for all runs.

    Args:
        records: one per run.
        tie: a smaller difference between the two best logits is a tie.
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


def gamma_rows(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table: a line per gamma."""
    lines = [
        "| gamma | prompts | equal | differ at a tie | differ elsewhere | flushes | accepted |",
        "|--:|" + "--:|" * 6,
    ]
    for row in entries:
        cells = [str(row[key]) for key in ("gamma", "prompts", "equal", "at_a_tie", "elsewhere", "flushes")]
        lines.append(f"| {' | '.join(cells)} | {row['accepted']:.3f} |")
    return lines


def equality_text(content: Mapping[str, Any]) -> list[str]:
    """Return the table and the sentences below it."""
    runs = sum(row["prompts"] for row in content["rows"])
    lines = [*gamma_rows(content["rows"]), "", f"{runs} runs; {content['refused']} drafts were rejected in total.", ""]
    lines += [f"Smallest gap between the two best logits: {content['smallest_gap']:.2e}."]
    lines += [f"Near-ties (below {content['tie']:g}) of the target alone: {len(content['ties'])}."]
    return [*lines, *(f"- {prompt}, token {place}: {gap:.2e}" for prompt, place, gap in content["ties"])]
