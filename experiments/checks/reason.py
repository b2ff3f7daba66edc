"""Figures of results/tiny-reason, in its own page, in the bundled model's README, in the recipe and in docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Block, Rule, Text
from experiments.reason.fold import BUNDLED_NOISE, lengths_table, trainings_table
from experiments.stored import ROOT, csv_rows, load_result_json
from kvbench.metrics.fidelity import mcnemar
from kvbench.metrics.intervals import newcombe

NOISE, LOG, TABLE = "results/tiny-reason/noise.json", "results/tiny-reason/train_log.jsonl", "results/tiny-reason/reason"
PAGE, MODEL, RECIPE = "results/tiny-reason/README.md", "kvbench/models/tiny-reason/README.md", "experiments/tiny/reason.yaml"


def reason_rules() -> Iterator[Rule]:
    """Yield the rules."""
    measured = load_result_json(NOISE)
    (bundled,) = (one for one in measured["trainings"] if one["noise"] == BUNDLED_NOISE)
    yield Block(PAGE, trainings_table(measured), NOISE, "trainings")
    yield Block(MODEL, trainings_table({**measured, "trainings": [bundled]}), NOISE, "bundled")
    if (ROOT / TABLE / "table.md").exists():
        files = f"{TABLE}/lengths.csv", f"{TABLE}/steps.csv"
        yield Block(f"{TABLE}/table.md", lengths_table(*map(csv_rows, files)), ", ".join(files))
    yield from _sentences(measured["n"], measured["trainings"], bundled)


def _sentences(n: int, trainings: list[dict[str, Any]], bundled: dict[str, Any]) -> Iterator[Rule]:
    """Yield the sentences about the four trainings and the bundled one."""
    last = json.loads((ROOT / LOG).read_text(encoding="utf-8").splitlines()[-1])
    assert all(last[key] == bundled[key] for key in ("step", "tokens") if key in bundled), "the log is another training's"
    yield Text(MODEL, LOG, f"AdamW, {last['step']} steps of {last['tokens'] / last['step']:.0f} tokens ({last['tokens'] / 1e6}M tokens) in {last['seconds']} s")
