"""Made-up runs on disk, without a model: for tests of the report and for measurements of its page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from kvbench.results import aggregate
from kvbench.results.identity import short_name
from kvbench.results.samples import encode_row
from kvbench.results.store import RunStore

#: names of the methods' classes
CLASSES = {
    "fp16": "FP16",
    "kivi": "Kivi",
    "atom": "Atom",
    "cocktail": "Cocktail",
    "logquant": "LogQuant",
    "snapkv": "SnapKV",
}
FORMATS = {side: {"bits": 2, "group_size": 32, "axis": axis} for side, axis in (("key", "channel"), ("value", "token"))}
DEVICE = "a processor"


def config(method: str = "kivi", /, **groups: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.yaml` as the command line composes it."""
    content: dict[str, Any] = {
        "model": {"name": "tiny", "path": "kvbench:tiny", "weights": "pretrained", "dtype": "bfloat16"},
        "quantizer": {"name": "none"} if method == "fp16" else {"name": "int2", **FORMATS},
        "method": {"_target_": f"kvbench.methods.{method}.{CLASSES[method]}"}
        | ({"residual": 128, "sinks": 0} if method == "kivi" else {}),
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


def made_point(prompt: int, batch: int, tpot_s: float, kv: int, *, fits: bool = True) -> dict[str, Any]:
    """Return a row of time and memory at a prompt length and a batch size; one that ran out of memory if not `fits`."""
    figures: dict[str, Any] = {"status": "ok" if fits else "oom"}
    if fits:
        sizes = {"total": kv, "codes": kv, "scales": 0, "window": 0, "index": 0}
        percentiles = {"p10": 0.9 * tpot_s, "p90": 1.2 * tpot_s, "p99": 1.5 * tpot_s}
        figures |= {
            "ttft_s": 1e-4 * prompt * batch,
            "first_step_s": 2 * tpot_s,
            "tpot_s": {"median": tpot_s, "mean": tpot_s, **percentiles, "n": 31},
            "tokens_per_s": batch / tpot_s,
            "new_tokens": 32,
            "kv_used": sizes,
            "kv_reserved": sizes,
            "kv_fp16": 4 * kv,
            "peak": {"prefill": 9 * kv * batch, "decode": 6 * kv * batch},
        }
    return {
        "id": f"efficiency@{prompt}/b{batch}",
        "task": "efficiency",
        "length": prompt,
        "status": figures["status"],
        "prediction": "",
        "scores": {},
        "scorer_version": 1,
        "measured": {"device": DEVICE, "warm_up": False, "batch_rows": batch, "point": figures},
    }


def metrics(run_id: str, settings: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the content of a `metrics.json` for some rows; `more` replaces keys."""
    scores = aggregate.scores(rows, {entry["id"]: {**entry, "scores": {"score": 1.0}} for entry in rows})
    timings = aggregate.timings(rows)
    times = timings.get(DEVICE, aggregate.no_timings())
    return {
        "schema_version": 3,
        "run_id": run_id,
        "status": "ok",
        "label": short_name(settings),
        "config": {
            "model": settings["model"]["name"],
            "method": {key: value for key, value in settings["method"].items() if str(value) not in ("nan", "inf")},
            "quantizer": settings["quantizer"]["name"],
            "dataset": settings["dataset"]["name"],
            "decoding": settings["decoding"],
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


def write_made_run(folder: Path, number: int, method: str = "kivi", /, **more: Any) -> RunStore:
    """Write a made-up run and return its store.

    Args:
        number: number of the run, part of its id.
        method: a key of :data:`CLASSES`.
        more: ``setting`` (a number; runs with the same one are comparable), ``rows``, ``groups`` (changes of the
            configuration); ``unfinished`` leaves out `metrics.json`; all others replace keys of it.
    """
    rows = more.pop("rows", [row(index, 1.0 if index else 0.5) for index in range(3)])
    settings = config(method, **more.pop("groups", {}))
    unfinished = more.pop("unfinished", False)
    store = RunStore(folder, run_id(number, more.pop("setting", 0)))
    store.path.mkdir(parents=True)
    store.start(settings)
    store.samples_path.write_bytes(b"".join(encode_row(entry) for entry in rows))
    if not unfinished:
        store.write_metrics(metrics(store.run_id, settings, rows, **more))
    return store


#: quantizers and hyper-parameters of the methods of :func:`many`
GRID: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = {
    "fp16": (("none",), {}),
    "kivi": (("int2", "int3", "int4", "int8"), {"residual": (32, 64, 96, 128, 192, 256), "sinks": (0, 2, 4)}),
    "atom": (("int2_token", "int4_token"), {}),
    "cocktail": (("none",), {"alpha": (0.3, 0.4, 0.5, 0.6, 0.7), "beta": (0.05, 0.1, 0.2), "chunk_size": (16, 32, 64)}),
    "logquant": (("int2_g64", "int4_g64"), {"reserved": (64, 128, 192, 256), "key_axis": ("channel", "token")}),
    "snapkv": (("none",), {"budget": (128, 256, 512, 1024)}),
}
TASKS = ("key_value", "key_value_hex", "multi_value", "copy_long", "repeat")


def many(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Write a made-up sweep of `count` runs and return their ids: five tasks, several methods and settings."""
    draw = random.Random(seed)
    ids = []
    settings = list(_settings())
    for number in range(count):
        setting, place = divmod(number, len(settings))
        method, quantizer, options = settings[place]
        ratio = 1.0 if method == "fp16" else draw.uniform(1.5, 7)
        quality = 1.0 if method == "fp16" else max(0.1, 1.1 - 0.12 * ratio + draw.gauss(0, 0.08))
        rows = []
        for task in TASKS:
            for index in range(4):
                entry = row(
                    index, float(draw.random() < quality), f"the answer to {index} is {draw.randrange(99)}", task
                )
                used = {"codes": 500, "scales": 150, "window": 350} if method != "fp16" else {"window": 1000}
                entry["kv_bytes"]["used"] = _bill(used, 8e6 / ratio)
                entry["kv_bytes"]["fp16_equivalent"] = 8_000_000
                pace = draw.uniform(0.01, 0.02) * (1 + 0.1 * ratio)
                entry["measured"]["step_s"] = [round(pace * draw.uniform(0.8, 1.6), 6) for _ in range(8)]
                rows.append(entry)
        groups = {"quantizer": {"name": quantizer}, "method": options, "dataset": {"seed": setting}}
        more = {} if method == "fp16" else {"baseline": run_id(0, setting)}  # the first of each setting
        ids.append(write_made_run(folder, place, method, setting=setting, rows=rows, groups=groups, **more).run_id)
    return ids


def _bill(shares: dict[str, int], total: float) -> dict[str, int]:
    parts = {part: int(total * shares.get(part, 0) / 1000) for part in ("codes", "scales", "window", "index")}
    return {"total": sum(parts.values()), **parts}


def _settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield all settings of :data:`GRID`: method, quantizer and options."""
    for method, (quantizers, options) in GRID.items():
        for quantizer in quantizers:
            for values in product(*options.values()):
                yield method, quantizer, dict(zip(options, values, strict=True))
