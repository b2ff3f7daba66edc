"""Whether a `metrics.json` holds what tables and reports read of one: a foreign file must cost no other run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: kinds of leaves: a number or null, a number, a text or null, anything
NUMBER, GIVEN, TEXT, ANY = "a number or null", "a number", "a text", "anything"

_PARTS = dict.fromkeys(("total", "codes", "scales", "window", "index"), NUMBER)
_PAIR = {"diff": GIVEN, "stderr": NUMBER, "n": NUMBER}
_MEAN = {"score": NUMBER, "stderr": NUMBER, "n": NUMBER}
_TIMES = {"ttft_s": {"median": NUMBER}, "tpot_s": {"median": NUMBER, "p99": NUMBER}, "tokens_per_s": NUMBER}

_METRICS: dict[str, Any] = {
    "run_id": TEXT,
    "status": TEXT,
    "label": TEXT,
    "config": {"model": TEXT, "method": {}, "dataset": TEXT, "decoding": {}, "seed": NUMBER},
    "samples": {"requested": NUMBER, "done": GIVEN, "truncated": NUMBER},
    "scores": {},
    "mean": _MEAN,
    "kv_bytes": {"used": _PARTS, "reserved": _PARTS, "ratio": NUMBER},
    "peak_bytes": {"prefill": NUMBER, "decode": NUMBER, "kind": TEXT, "rss": NUMBER},
    **_TIMES,
    "timings": {},
    "attention": {"reads_packed": ANY, "path": TEXT},
    "error": TEXT,
    "env": {},
}
_PERPLEXITY = {"ppl": GIVEN, "stderr": NUMBER, "bits_per_byte": NUMBER, "mode": TEXT, "windows": NUMBER}
_POINT = {"status": TEXT}
_POINT_OK = {
    **dict.fromkeys(("ttft_s", "search_s", "first_step_s", "kv_used", "kv_ratio"), NUMBER),
    "tokens_per_s": GIVEN,
    "tpot_s": {"median": NUMBER},
    "over_used": NUMBER,
    "peak_decode": NUMBER,
    "stepping": TEXT,
    "predicted": ANY,
}


def problem(metrics: Any) -> str | None:
    """What is not as it should be, for example ``mean.score is missing``; None where all is well."""
    found = _differs(metrics, _METRICS, "")
    if found:
        return found
    for key, entry in metrics["scores"].items():
        found = _entry(entry, f"scores.{key}")
        if found:
            return found
    if _differs(metrics["mean"], {"vs_fp16": ANY}, "") or _optional(metrics["mean"], "vs_fp16", _PAIR, "mean"):
        return "mean.vs_fp16 is no difference to fp16"
    for device, times in metrics["timings"].items():
        found = _differs(times, _TIMES, f"timings.{device}")
        if found:
            return found
    if metrics["status"] == "oom":
        return _differs(metrics, {"oom": {"bytes_asked": NUMBER}}, "")
    speculation = {"acceptance_rate": NUMBER, "stderr": NUMBER, "tokens_per_round": NUMBER, "speedup": NUMBER}
    return _optional(metrics, "speculation", speculation, "")


def _entry(entry: Any, where: str) -> str | None:
    """What is wrong with one entry of ``scores``."""
    found = _differs(entry, {**_MEAN, "vs_fp16": ANY, "nll": ANY}, where) or _optional(entry, "vs_fp16", _PAIR, where)
    found = found or _optional(entry, "nll", {"mean": GIVEN, "vs_fp16": ANY}, where)
    found = found or _optional(entry.get("nll") or {}, "vs_fp16", _PAIR, f"{where}.nll")
    found = found or _optional(entry, "perplexity", {**_PERPLEXITY, "vs_fp16": ANY}, where)
    found = found or _optional(entry.get("perplexity") or {}, "vs_fp16", _PAIR, f"{where}.perplexity")
    found = found or _optional(entry, "points", {"batches": {}}, where)
    if found or not entry.get("points"):
        return found
    if not where.rpartition("@")[2].isdigit():
        return f"{where} has points and no length"
    for batch, figures in entry["points"]["batches"].items():
        place = f"{where}.points.batches.{batch}"
        good = isinstance(figures, Mapping) and figures.get("status") == "ok"
        found = _differs(figures, {**_POINT, **_POINT_OK} if good else _POINT, place)
        if found or not str(batch).isdigit():
            return found or f"{place} is no batch"
    return None


def _optional(value: Mapping[str, Any], key: str, shape: Mapping[str, Any], where: str) -> str | None:
    """What is wrong with `key`, which may be missing or null."""
    return None if value.get(key) is None else _differs(value[key], shape, f"{where}.{key}".lstrip("."))


def _differs(value: Any, shape: Any, where: str) -> str | None:
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return f"{where or 'the whole'} is no object"
        for key, inner in shape.items():
            place = f"{where}.{key}".lstrip(".")
            found = _differs(value[key], inner, place) if key in value else f"{place} is missing"
            if found:
                return found
        return None
    if shape == ANY or (value is None and shape != GIVEN):
        return None
    if shape == TEXT:
        return None if isinstance(value, str) else f"{where} is no text"
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return None if good else f"{where} is no number"
