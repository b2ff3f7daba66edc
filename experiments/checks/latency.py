"""Rules for docs/bytes-and-latency.md, whose tables are written by :mod:`experiments.efficiency.latency`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Rule, Text, Whole, load
from experiments.efficiency.latency import FOLDER, MODELS, PAPER, fits, points, tables

PAGE = "docs/bytes-and-latency.md"
SEVEN, EIGHT = MODELS["Llama-2-7B"], MODELS["Llama-3.1-8B"]
#: read bandwidth of an H200 that shares of the ceiling refer to, in GB/s
CEILING = 4690


def packed(name: str) -> list[dict[str, Any]]:
    """Return the points of a model with one sequence and a quantized cache."""
    return [point for point in points(name, batch=1, status="ok") if point["setting"] != "fp16"]


def faster(name: str) -> list[float]:
    """Return how many of these points are more than 1 % faster than fp16, and how many there are."""
    return [sum(point["S"] > 1.01 for point in packed(name)), len(packed(name))]


def at(name: str, setting: str, prompt: int, key: str) -> float:
    """Return a figure of one point."""
    (point,) = points(name, batch=1, setting=setting, prompt=prompt)
    return float(point[key])


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Whole(PAGE, "\n".join(tables()), f"{FOLDER}, {PAPER}")
    long, short, source = 128 * 1024, 4096, FOLDER
    pattern = (
        "Here {} of {} points are more than 1 % faster with Llama-2-7B, and {} of {} with Llama-3.1-8B. S reaches {}"
    )
    pattern += " and {}, at"
    best = [max(point["S"] for point in packed(name)) for name in (SEVEN, EIGHT)]
    yield Text(PAGE, pattern, [*faster(SEVEN), *faster(EIGHT), *best], source)
    bound = max(point["S_cache"] for point in packed(EIGHT) if point["prompt"] == short)
    yield Text(PAGE, "could make Llama-3.1-8B at most {} times as fast", [bound], source)
    lines = {name: [row for key, row in fits(name).items() if key != "fp16"] for name in (SEVEN, EIGHT)}
    ends = [end(row["break_even"] for row in lines[name]) / 100 for name in (SEVEN, EIGHT) for end in (min, max)]
    values = [100 * round(value) for value in ends]
    pattern = "are {} to {} tokens with Llama-2-7B, whose cache is four times as large per token, and {} to {} with"
    yield Text(PAGE, pattern, values, source)
    rates = {name: {key: 100 * row["BW_eff_GB_s"] / CEILING for key, row in fits(name).items()} for name in lines}
    values = [min(rates[SEVEN].values()), max(rates[SEVEN].values())]
    yield Text(PAGE, "Llama-2-7B's caches are read at {} to {} % of the ceiling in every format", values, source)
    values = [rates[EIGHT][f"kivi:{bits}"] for bits in ("int8", "int4", "int2")]
    yield Text(PAGE, "caches are read at {} % (int8), {} % (int4) and {} % (int2)", values, source)
    shares = [100 * point["S"] / point["S_cache"] for point in packed(EIGHT) if point["prompt"] == long]
    yield Text(PAGE, "at 128k S is {} to {} % of S_cache", [min(shares), max(shares)], source)
    more = [[1e3 * (row["c0_s"] - fits(name)["fp16"]["c0_s"]) for row in lines[name]] for name in lines]
    values = [end(part) for part in more for end in (min, max)]
    yield Text(PAGE, "(c0) is {} to {} ms above fp16's with Llama-2-7B and {} to {} ms with", values, source)
    values = [at(SEVEN, f"kivi:{bits}", long, "r_alloc") for bits in ("int4", "int2")]
    yield Text(PAGE, "r_nom is 4 and 8 where r_alloc is {} and {}", values, source)
    values = [at(EIGHT, f"kivi:{bits}", short, "r_alloc") for bits in ("int4", "int2")]
    yield Text(PAGE, "step allocates take more: {} and {} with Llama-3.1-8B", values, source)
    idle = load(f"{FOLDER}/energy_fp16.json")["machine"]["idle_W"]
    yield Text(PAGE, "Idle it drew {} W", [idle], f"{FOLDER}/energy_fp16.json")
    weights = load(f"{FOLDER}/capacity.json")["rows"][0]["weights"] / 2**30
    yield Text(PAGE, "of which {} GiB are Llama-2-7B's weights", [weights], f"{FOLDER}/capacity.json")
    values = [at(name, "kivi:int8", long, "S") for name in (SEVEN, EIGHT)]
    yield Text(PAGE, "int8 is the nearest that is measured here: S is {} and {} at 128k", values, source)
