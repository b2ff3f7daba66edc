"""Runs on disk for tests of the page: rows and metrics without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvbench.results import aggregate
from kvbench.results.identity import short_name
from kvbench.results.samples import encode
from kvbench.results.store import RunStore

CLASSES = {"fp16": "FP16", "kivi": "Kivi", "atom": "Atom"}
FORMATS = {side: {"bits": 2, "group_size": 32, "axis": axis} for side, axis in (("key", "channel"), ("value", "token"))}
DEVICE = "a processor"


def config(method: str = "kivi", /, **groups: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.yaml` as the command line composes it."""
    content: dict[str, Any] = {
        "model": {"name": "tiny", "path": "kvbench:tiny", "weights": "pretrained", "dtype": "bfloat16"},
        "quantizer": {"name": "none"} if method == "fp16" else {"name": "int2", **FORMATS},
        "method": {"_target_": f"kvbench.methods.{method}.{CLASSES[method]}"}
        | ({} if method == "fp16" else {"residual": 128, "sinks": 0}),
        "dataset": {"_target_": "kvbench.tasks.mini.Mini", "name": "mini", "lengths": [2048], "limit": 4, "seed": 0},
        "decoding": {"max_new_tokens": None, "temperature": 0.0},
        "runtime": {"device": "auto", "batch_size": 1, "seed": 0},
        "logger": {"name": "none"},
    }
    for group, values in groups.items():
        content[group] = {**content[group], **values}
    return content


def row(index: int, score: float, prediction: str = "", task: str = "key_value") -> dict[str, Any]:
    """Return a row of `samples.jsonl`."""
    parts = {"codes": 600, "scales": 200, "window": 200, "index": 0}
    return {
        "id": f"{task}@2048/{index}",
        "task": task,
        "length": 2048,
        "prediction": prediction or f"answer {index}",
        "scores": {"score": score},
        "scorer_version": 1,
        "kv_bytes": {kind: {"total": 1000, **parts} for kind in ("used", "reserved")} | {"fp16_equivalent": 4000},
        "measured": {
            "device": DEVICE,
            "warm_up": index == 0,
            "batch_rows": 1,
            "ttft_s": 0.5 + 0.1 * index,
            "step_s": [0.05, 0.02, 0.03],
            "decoded": 3,
            "peak_bytes": {"prefill": 5000, "decode": 3000, "kind": "cpu_live_tensors", "rss": 9000},
        },
    }


def metrics(run_id: str, made: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the content of a `metrics.json` for some rows; `more` replaces keys."""
    scores = aggregate.scores(rows, {entry["id"]: {**entry, "scores": {"score": 1.0}} for entry in rows})
    timings = aggregate.timings(rows)
    times = timings.get(DEVICE, aggregate.no_timings())
    return {
        "schema_version": 3,
        "run_id": run_id,
        "status": "ok",
        "label": short_name(made),
        "config": {
            "model": made["model"]["name"],
            "method": {key: value for key, value in made["method"].items() if str(value) not in ("nan", "inf")},
            "quantizer": made["quantizer"]["name"],
            "dataset": made["dataset"]["name"],
            "decoding": made["decoding"],
            "seed": 0,
        },
        "samples": {"requested": len(rows), "done": len(rows)},
        "scores": scores,
        "mean": aggregate.overall(scores),
        "kv_bytes": aggregate.kv_bytes(rows),
        "peak_bytes": aggregate.peak_bytes(rows),
        **{key: times[key] for key in ("ttft_s", "tpot_s", "tokens_per_s")},
        "timings": timings,
        "env": {"device_name": DEVICE},
        **more,
    }


def run_id(number: int, setting: int = 0) -> str:
    """Return the id of a made-up run; runs with the same `setting` are comparable."""
    return f"{setting:010x}-{number:010x}"


def write(folder: Path, number: int, method: str = "kivi", /, **more: Any) -> RunStore:
    """Write a made-up run and return its store.

    Args:
        folder: folder of the runs.
        number: number of the run, part of its id.
        method: a key of :data:`CLASSES`.
        more: ``setting`` (a number; runs with the same one are comparable), ``rows``, ``groups`` (changes of the
            configuration); ``unfinished`` leaves out `metrics.json`; all others replace keys of it.
    """
    rows = more.pop("rows", [row(index, 1.0 if index else 0.5) for index in range(3)])
    made = config(method, **more.pop("groups", {}))
    unfinished = more.pop("unfinished", False)
    store = RunStore(folder, run_id(number, more.pop("setting", 0)))
    store.path.mkdir(parents=True)
    store.start(made)
    store.samples_path.write_bytes(b"".join(encode(entry) for entry in rows))
    if not unfinished:
        store.write_metrics(metrics(store.run_id, made, rows, **more))
    return store


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a page, found as a browser finds them: up to the first end of the element."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content
