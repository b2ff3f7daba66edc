"""Points (dataset=efficiency): time and memory measured at one prompt length and batch size, compared with fp16.

Compression and speed-up are ratios to fp16 at the same work.

The terms are those of the paper "Bytes Are Not Latency" (github.com/fzlzjerry/kvbench, 2026), sec. 2.5 and 3.2. Same
work: equal batch, length, number of new tokens, graph mode and timing boundary. Where fp16 does not fit, there is
no speed-up, only a capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench.results.samples import MEASURED, Row


def nominal_compression(key_bits: float, value_bits: float, full_bits: float = 16.0) -> float:
    """Return r_nom: the full-precision bits of a key and a value divided by those of the formats, without metadata.

    The bits are means per element. Layers or tokens in full precision count with their bits, so that
    ``1 / r_nom = f + (1 - f)(q_K + q_V) / 32`` with a share f of bf16 layers.
    """
    return 2 * full_bits / (key_bits + value_bits)


def allocated_compression(full_bytes: int, peak: int, weights: int) -> float:
    """Return r_alloc: bytes of the keys and values in full precision divided by all that decoding allocates for them.

    That is the peak of memory while decoding minus the weights: codes, metadata, windows, padding, spare room in the
    buffers, and workspaces of kernels and graphs. All are in bytes.
    """
    return full_bytes / (peak - weights)


def same_work_ratio(fp16_s: float, method_s: float) -> float:
    """Return S, the same-work ratio: the time per token of fp16 divided by the method's."""
    return fp16_s / method_s


def cache_bound(fp16_s: float, fp16_bytes: float, rate: float, ideal_bytes: float, peak_rate: float) -> float:
    """Return S_cache: the largest speed-up that a smaller cache can give, all other work being as with fp16.

    ``S_cache = T_bf16 / (T_nc + D_ideal / BW_peak)``, where the time that is not the cache's is
    ``T_nc = T_bf16 - D_bf16 / BW_eff``.

    Args:
        fp16_s: time per token of fp16 in seconds, T_bf16.
        fp16_bytes: bytes of fp16's cache, D_bf16.
        rate: bandwidth in bytes/s at which a step of fp16 effectively reads its cache, BW_eff.
        ideal_bytes: bytes of the method's cache, which an ideal kernel reads once, D_ideal.
        peak_rate: read bandwidth of the device in bytes/s, BW_peak.
    """
    return fp16_s / (fp16_s - fp16_bytes / rate + ideal_bytes / peak_rate)


Figures = dict[str, Any]

#: figures of a point that are copied to metrics.json unchanged
_COPIED = (
    "status",
    "ttft_s",
    "search_s",
    "prefill_s",
    "first_step_s",
    "tpot_s",
    "itl_s",
    "tokens_per_s",
    "capture_s",
    "stepping",
    "speculation",
    "forced",
    "round_times",
    "path",
    "weights",
    "over_used",
    "over_reserved",
    "predicted",
    "read_bytes",
    "GB_s",
    "ceiling",
    "read_share",
    "over_roof",
    "energy",
    "same",
    "fill",
    "new_tokens",
    "stock",
    "bytes_asked",
    "phase",
    "beyond",
)


def summarize_points(group: Sequence[Row], baseline: Mapping[str, Row] | None = None) -> Figures | None:
    """Summarize the points of one prompt length: the batch sizes that fitted, the throughput, and ratios to fp16.

    `group` has one row per batch size. `baseline` are rows of the fp16 run with the same model on the same machine, by
    sample id; None without such a run.

    Returns:
        The content of :class:`kvbench.results.record_scores.Points`, with the batch sizes that fitted into memory and
        the smallest that did not; None if the rows contain no points.
    """
    rows = {row[MEASURED]["batch_rows"]: row for row in group if row.get(MEASURED, {}).get("point")}
    if not rows:
        return None
    figures = _limits(rows)
    others = {batch: (baseline or {}).get(row["id"]) for batch, row in rows.items()}
    length = group[0].get("length")
    fp16_rows = {
        row[MEASURED]["batch_rows"]: row
        for row in (baseline or {}).values()
        if row.get("length") == length and row.get(MEASURED, {}).get("point")
    }
    fp16 = _limits(fp16_rows) if fp16_rows else {"max_batch": None, "oom_batch": None, "tokens_per_s": None}
    ended = figures["oom_batch"] and fp16["oom_batch"]
    figures["max_batch_vs_fp16"] = _ratio(figures["max_batch"], fp16["max_batch"]) if ended else None
    figures["tokens_per_s_vs_fp16"] = _ratio(figures["tokens_per_s"], fp16["tokens_per_s"])
    shown = [batch for batch, row in sorted(rows.items()) if row["status"] == "ok" or batch == figures["oom_batch"]]
    figures["batches"] = {str(batch): _point_ratios(rows[batch], others[batch]) for batch in shown}
    return figures


def each(metrics: Mapping[str, Any]) -> Iterator[tuple[int, int, Figures]]:
    """Iterate over the points of a run: yield (prompt length in tokens, batch size, figures) for each of them."""
    for key, entry in metrics.get("scores", {}).items():
        for batch, figures in ((entry.get("points") or {}).get("batches") or {}).items():
            yield int(key.rsplit("@", 1)[1]), int(batch), figures


def has_points(metrics: Mapping[str, Any]) -> bool:
    """Return True if a run measured time and memory (dataset=efficiency) instead of answering questions."""
    entries = list(metrics.get("scores", {}).values())
    return bool(entries) and all(entry.get("points") for entry in entries)


def headline(scores: Mapping[str, Mapping[str, Any]]) -> Figures:
    """Return the overall time and throughput of a run that measured points, for the top level of its `metrics.json`.

    They are ``tokens_per_s``, the highest throughput of all points, and, if the run has a single point that fitted into
    memory, its ``ttft_s`` and ``tpot_s``. The dict is empty if no point fitted.
    """
    points_ok = [figures for _, _, figures in each({"scores": scores}) if figures["status"] == "ok"]
    if not points_ok:
        return {}
    top: Figures = {"tokens_per_s": max(figures["tokens_per_s"] for figures in points_ok)}
    if len(points_ok) == 1:
        (one,) = points_ok
        tpot = one["tpot_s"]
        top["ttft_s"] = {"median": one["ttft_s"], "n": 1}
        top["tpot_s"] = {"median": tpot["median"], "p99": tpot["p99"], "first_step": one["first_step_s"], "n": 1}
    return top


def _limits(rows: Mapping[int, Row]) -> Figures:
    """Return the largest batch that fitted, the smallest that did not, and the highest throughput with its batch."""
    good = {batch: row[MEASURED]["point"]["tokens_per_s"] for batch, row in rows.items() if row["status"] == "ok"}
    best = max(good, key=lambda batch: good[batch]) if good else None
    return {
        "max_batch": max(good, default=None),
        "oom_batch": min((batch for batch, row in rows.items() if row["status"] == "oom"), default=None),
        "best_batch": best,
        "tokens_per_s": good[best] if best is not None else None,
    }


def _point_ratios(row: Row, other: Row | None) -> Figures:
    point = row[MEASURED]["point"]
    figures = {key: point[key] for key in _COPIED if key in point}
    if row["status"] == "ok":
        figures |= {f"kv_{kind}": point[f"kv_{kind}"]["total"] for kind in ("used", "reserved")}
        figures |= {f"peak_{phase}": point["peak"][phase] for phase in ("prefill", "decode")}
        for key, kind in (("kv_ratio", "used"), ("kv_ratio_reserved", "reserved")):
            figures[key] = _ratio(point["kv_fp16"] * halves(row), figures[f"kv_{kind}"])
        figures |= _compression(point, halves(row))
        if other is not None and other.get("status") == "ok":
            full = other[MEASURED]["point"]
            figures["vs_fp16"] = {
                "ttft_s": _ratio(point["ttft_s"], full["ttft_s"]),
                "tpot_s": _ratio(point["tpot_s"]["median"], full["tpot_s"]["median"]),
                "tokens_per_s": _ratio(point["tokens_per_s"], full["tokens_per_s"]),
                "peak_decode": _ratio(point["peak"]["decode"], full["peak"]["decode"]),
            }
    return figures


def _compression(point: Mapping[str, Any], halves: int) -> Figures:
    """Return r_nom (:func:`nominal_compression`) and r_alloc (:func:`allocated_compression`); None where unknown."""
    bits, peak, weights = point.get("nominal_bits"), point["peak"]["decode"], point.get("weights")
    return {
        "r_nom": nominal_compression(bits["key"], bits["value"], 16.0 * halves) if bits else None,
        "r_alloc": allocated_compression(point["kv_fp16"] * halves, peak, weights) if peak and weights else None,
    }


def halves(row: Row) -> int:
    """Return the factor from 16-bit sizes to sizes in the model's dtype: 2 for a row of a float32 model, else 1."""
    return 2 if row.get(MEASURED, {}).get("dtype") == "float32" else 1


def _ratio(own: float | None, full: float | None) -> float | None:
    return own / full if own is not None and full else None
