"""QuantSpec's Table 5: latencies of one attention layer, from the JSON files of ``python -m kvbench.bench kernel``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import published, stored
from experiments.fold.analytic import length
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.fold.claims import decided
from experiments.fold.points import FOLDERS
from experiments.item import Computed
from experiments.plan import Plan


def latencies(item: Computed, plan: Plan, folder: Path = FOLDERS[-1]) -> Folded:
    """Return milliseconds by kernel and context, with the speed-up over FlashAttention in 16 bits.

    Args:
        item: its options name the file, the shape of heads, the contexts, and for each row the format; ``flash`` is
            torch's FlashAttention over keys and values in 16 bits.
        plan: the command line's choices.
        folder: folder of the file.
    """
    options = item.options
    path = folder / f"{options['file']}.json"
    content = stored.content(path) if path.exists() else {}
    same = not plan.models or list(plan.models) == [model.preset for model in item.models]
    missing = f"not measured: python -m kvbench.bench kernel needs a GPU ({options['file']}.json)"
    reason = missing if same else "one layer of the paper's shape is measured, whatever the model"
    headings, cells, verdicts = [], [], []
    title = plan.models_of(item)[0].title
    for context in options["contexts"]:
        name = length(context)
        headings.append(Heading(name=name, unit="ms", digits=3))
        base = _us(content, options, "flash", context) if same else None
        for row, (kernel, form) in options["rows"].items():
            us = _us(content, options, form, context) if same else None
            number, ratio = (
                published.lookup(item.published, {"kernel": kernel, "context": name}, column)
                for column in ("latency_ms", "speedup")
            )
            place: dict[str, Any] = {"model": title, "row": row, "column": name, "paper": number}
            if us is None:
                cells.append(Cell(**place, reason=reason))
                continue
            note = "" if base is None or form == "flash" else f"{base / us:.2f} times as fast as FlashAttention"
            cells.append(Cell(**place, ours=us / 1000, n=1, runs=(path.name,), note=note))
            if base is not None and form != "flash" and ratio is not None:
                verdicts.append(_verdict(f"{row} at {name}: {ratio:g} times as fast", title, ratio, base / us))
    notes = []
    if same and content:
        best = ", ".join(f"{length(c)} {_us(content, options, 'cudnn', c):.0f} us" for c in options["contexts"])
        notes = [f"Measured on: {content['device']}. The fastest 16-bit attention of torch there is cuDNN's: {best}."]
    return Folded(
        headings=headings, rows=list(options["rows"]), models=[title], cells=cells, verdicts=verdicts, notes=notes
    )


def _us(content: Mapping[str, Any], options: Mapping[str, Any], form: str, context: int) -> float | None:
    """Return the microseconds of a format, or of a back end of torch, at batch 1 with one new token."""
    place = f"{options['shape']} B1 {length(context)} q1"
    baseline = content.get("baselines", {}).get(place, {}).get(form)
    if isinstance(baseline, Mapping):
        return float(baseline["us"])
    for row in content.get("rows", ()):
        at = (row["model"], row["batch"], row["context"], row["q_len"], row["format"])
        if at == (options["shape"], 1, context, 1, form) and "us" in row:
            return float(row["us"])
    return None


def _verdict(claim: str, model: str, paper: float, ours: float) -> Verdict:
    """Return whether a speed-up is at least the paper's, less a tenth."""
    return decided(claim, model, ours, 0.9 * paper, float("inf"), n=1, unit="factor", paper=paper)
