"""``python -m experiments.quickstart``: the figures of ``make run``, from its runs to results/quickstart.

README.md's first table is held to that file (``python -m experiments --check --write`` writes it anew).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.place import add_options, choice, known, place

#: columns of the table: heading and preset of conf/experiment/quickstart
COLUMNS = {"fp16": "fp16", "kivi int4": "kivi4", "kivi int2": "kivi2", "atom int4": "atom4"}


#: what a difference has beside its value: ending of the key in the file, and key in metrics.json
ENDS = {"_stderr": "stderr", "_low": "low", "_high": "high"}


def figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table shows of a run's metrics.json."""

    def cell(entry: Mapping[str, Any]) -> dict[str, Any]:
        paired = entry.get("vs_fp16") or {}
        both = {"diff": paired.get("diff"), **{f"diff{end}": paired.get(key) for end, key in ENDS.items()}}
        return {"score": entry["score"], "n": entry["n"], **{key: entry.get(key) for key in ENDS.values()}, **both}

    return {
        "tasks": {name: cell(entry) for name, entry in metrics["scores"].items()},
        "mean": cell(metrics["mean"]),
        "kv_bytes": metrics["kv_bytes"]["used"]["total"],
        "ratio": metrics["kv_bytes"]["ratio"],
        "peak_prefill": metrics["peak_bytes"]["prefill"],
        "peak_decode": metrics["peak_bytes"]["decode"],
        "ttft_s": metrics["ttft_s"]["median"],
        "tpot_s": metrics["tpot_s"]["median"],
    }


def main() -> int:
    """Write the file; 1 if a run is missing."""
    parser = argparse.ArgumentParser(prog="python -m experiments.quickstart", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results/quickstart"), help="folder of quickstart.json")
    add_options(parser)
    arguments = parser.parse_args()
    from experiments.runs import Run, identify
    from kvbench.results.store import RunStore

    content: dict[str, Any] = {"origin": "make run, then python -m experiments.quickstart --write", "columns": {}}
    for name, preset in COLUMNS.items():
        run, reason = identify(Run((f"experiment=quickstart/{preset}",), "tiny", "mini"))
        metrics = RunStore(arguments.runs, run).metrics() if run else None
        if metrics is None or metrics["status"] != "ok":
            print(f"{name}: run {run} is not complete in {arguments.runs}: make run{'; ' + reason if reason else ''}")
            return 1
        content["columns"][name] = figures(metrics)

    def samples(kept: Mapping[str, Any]) -> dict[str, int]:
        return {name: column["mean"]["n"] for name, column in kept["columns"].items()}

    old = known(arguments.out / "quickstart.json", samples)
    where = place(arguments.out, choice(arguments), samples(content), old)
    where.path.mkdir(parents=True, exist_ok=True)
    (where.path / "quickstart.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return where.say()


if __name__ == "__main__":
    raise SystemExit(main())
