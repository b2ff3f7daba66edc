"""Rules for README.md's table of ``make run``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Row, Rule, Text, Value, load, one, table
from kvbench.metrics import intervals
from kvbench.results import aggregate

PAGE, SOURCE = "README.md", "results/quickstart/quickstart.json"
FIDELITY = "results/tiny/fidelity/settings.csv"


def scored(cell: dict[str, Any]) -> list[Value]:
    """Return the score, and how far the interval of fp16's reaches, or others' paired difference and its interval."""
    if cell["diff"] is None:
        return [cell["score"], intervals.reach(cell["score"], aggregate.interval_of(cell))]
    pair = {"n": cell["n"], **{key: cell.get(f"diff_{key}") for key in ("stderr", "low", "high")}, "diff": cell["diff"]}
    return [cell["score"], cell["diff"], intervals.reach(cell["diff"], aggregate.pair_interval(cell["score"], pair))]


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    columns = load(SOURCE)["columns"]
    runs = list(columns.values())
    for task in runs[0]["tasks"]:
        yield Row(PAGE, "", task, [value for run in runs for value in scored(run["tasks"][task])], SOURCE)
    yield Row(PAGE, "", "**mean** (n = 40)", [value for run in runs for value in scored(run["mean"])], SOURCE)
    yield Text(PAGE, "| **mean** (n = {}) |", [runs[0]["mean"]["n"]], SOURCE)
    label = "[KL divergence](docs/fidelity.md) from fp16, 0.0001 nats a token"
    means = (one(table(FIDELITY), setting=name) for name in ("fp16", "kivi 4", "kivi 2", "atom 4"))
    yield Row(PAGE, "", label, [1e4 * float(row["kld_mean"]) for row in means], FIDELITY)
    label = "KV bytes of a sequence, and fp16's to them"
    yield Row(PAGE, "", label, [x for run in runs for x in (run["kv_bytes"] / 2**20, run["ratio"])], SOURCE)
    values = [run[key] / 2**20 for run in runs for key in ("peak_prefill", "peak_decode")]
    yield Row(PAGE, "", "peak memory of a batch of 8, prefill and decode", values, SOURCE)
    yield Row(PAGE, "", "TTFT of a batch of 8", [run["ttft_s"] for run in runs], SOURCE)
    yield Row(PAGE, "", "TPOT of a batch of 8, median", [1e3 * run["tpot_s"] for run in runs], SOURCE)
