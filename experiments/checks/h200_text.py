"""Rules for the running text of results/h200/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.h200 import PAGE, SETTINGS, TPOT, attention, median, roof, step
from experiments.checks.rules import Rule, Text, load, one

PROFILE, BATCH = "results/h200/whole/profile.json", "results/h200/profile_batch_7b.json"
CAPTURED = "results/h200/whole/captured.json"


def busy(file: str, name: str) -> tuple[float, dict[str, float]]:
    """Return the milliseconds in which the GPU is busy in a step, and their parts."""
    profile: dict[str, Any] = one(load(file)["rows"], setting=SETTINGS[name])["profile"]
    return profile["busy_ms"], profile["ms"]


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield from _tiers()
    yield from _profiles()
    yield from _peaks()
    yield from _captured()
    over = [
        100 * (median(row) / roof(row, "expected_tpot_s") - 1)
        for row in load(TPOT)["rows"]
        if row["path"] == "cuda" and row["predicted"]["expected_tpot_s"]
    ]
    assert len(over) == 16, TPOT
    within = [value for value in over if value < 15]
    assert len(within) == 15, TPOT
    yield Text(PAGE, "what is expected ({} to {} %)", [min(within), max(within)], TPOT)


def _tiers() -> Iterator[Rule]:
    file = "results/h200/kernel.json"
    rows = [attention(file, "7b", 1, 4, form) for form in ("mix", "kivi4")]
    mix, kivi = (row for row in rows if row is not None)
    yield Text(PAGE, "at 4k ({} against bf16's {})", [mix["us"], mix["best_us"]], file)
    yield Text(PAGE, "at 4k ({} against {}), +8 % at 32k", [kivi["us"], kivi["best_us"]], file)


def _profiles() -> Iterator[Rule]:
    whole, parts = busy(PROFILE, "kivi int4, G 128")
    values = [whole, parts["linear"], parts["attention"], parts["elementwise"], parts["append"], parts["pack"]]
    pattern = (
        "G 128 {} busy: linear layers {} for 13.2 GB (2.9 at the ceiling), attention {} for 4.6 GB (1.01), norms, "
    )
    pattern += "RoPE and the rest {}, appending {}, packing {} in the mean."
    yield Text(PAGE, pattern, values, PROFILE)
    names = ("linear", "attention", "elementwise", "append")
    whole, parts = busy(PROFILE, "logquant int2, W 64")
    yield Text(PAGE, "logquant {}: {}, {}, {}, {}.", [whole, *(parts[name] for name in names)], PROFILE)
    whole, parts = busy(PROFILE, "fp16")
    values = [whole, *(parts[name] for name in names)]
    yield Text(PAGE, "fp16 {}: {}, {} (3.8 at the ceiling), {}, {}.", values, PROFILE)
    shown = []
    for name in ("kivi int4, G 128", "logquant int2, W 64", "cocktail 10/30/60", "fp16"):
        parts = busy(BATCH, name)[1]
        whole = median(one(load(BATCH)["rows"], setting=SETTINGS[name]))
        shown.append([whole, parts["attention"], parts["linear"], parts.get("pack")])
    kivi, logquant, cocktail, fp16 = shown
    pattern = "kivi int4 {} (attention {}, linear layers {}, packing {}), logquant int2 {} ({}, {}, -), cocktail {} "
    pattern += "({}, {}, -), fp16 {} ({}, {}, -)"
    yield Text(PAGE, pattern, [*kivi, *logquant[:3], *cocktail[:3], *fp16[:3]], BATCH)


def _peaks() -> Iterator[Rule]:
    folder = "results/h200/peaks"
    rows = {
        row["setting"].split(":")[0]: row
        for name in ("prefill", "random", "kvquant")
        for row in load(f"{folder}/{name}.json")["rows"]
    }
    names = ("h2o", "streamingllm", "kvquant", "logquant", "partial_logquant", "snapkv")
    values = [rows[name]["over_used"] for name in names]
    values += [step("quantspec:gamma=4", thousands)["over_used"] for thousands in (32, 128)]
    pattern = (
        "h2o {}, streamingllm {}, kvquant {}, logquant W 42 on the reference path {}, partial_logquant {}, snapkv {}, "
    )
    pattern += "quantspec {} and, at 128k, {} (whole/tpot.json)"
    yield Text(PAGE, pattern, values, f"{folder}, {TPOT}")
    values = [median(rows[name]) for name in ("partial_logquant", "snapkv", "h2o", "kvquant")]
    yield Text(PAGE, "partial_logquant took {} ms, snapkv {}, h2o {} (eager), and kvquant {} at 8k", values, folder)
    yield Text(PAGE, "by the reference path, eager, {} ms a token at 32k", [median(rows["logquant"])], folder)
    yield Text(PAGE, "**StreamingLLM** took {} ms", [median(rows["streamingllm"])], folder)
    flush = [1e3 * step("logquant", 32)["tpot_s"]["p99"]]
    yield Text(PAGE, "a flush of all layers (p99 of the steps) {} ms", flush, TPOT)
    file = "results/h200/whole/prefill_w42.json"
    ratio = one(load(file)["rows"], setting="logquant")["over_stock"]
    yield Text(PAGE, "a 32k prompt is read and packed in {} of stock's time", [ratio], file)
    drafts = [step("quantspec:gamma=4", thousands)["speculation"] for thousands in (32, 128)]
    values = [draft[key] for draft in drafts for key in ("accepted", "drafted")]
    yield Text(PAGE, "right by chance alone: {} of {} and {} of {} accepted)", values, TPOT)


def _captured() -> Iterator[Rule]:
    rows = [row for row in load(CAPTURED)["rows"] if row["how"] == "graph"]
    assert len(rows) == 12 and all(row.get("parted_at") is None and row["same_bill"] for row in rows), CAPTURED
    tokens = rows[0]["tokens"]
    yield Text(PAGE, "snapkv: {} of {} each, same bytes", [tokens, tokens], CAPTURED)
    yield Text("docs/speed.md", "with the same kernel: {} of {} in all twelve settings", [tokens, tokens], CAPTURED)
    places = [row["compiled"]["parted_at"] for row in rows if row["compiled"]["parted_at"] is not None]
    gaps = [row["compiled"]["gap"] for row in rows if row["compiled"]["gap"] and not row["method"].startswith("atom")]
    assert len(places) == 9, CAPTURED
    values = [min(places), max(places), min(gaps), max(gaps)]
    yield Text(PAGE, "somewhere (token {} to {}), where the two best logits are {} to {} apart", values, CAPTURED)
