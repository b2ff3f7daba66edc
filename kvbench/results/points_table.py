"""Points of time and memory as a table: a line for each run, prompt length and batch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.results.points import each
from kvbench.util.cells import Cell, seconds, size

Metrics = Mapping[str, Any]

HEAD = ("", "prompt", "batch", "TTFT", "TPOT", "tokens/s", "KV", "peak", "steps")
NOTE = (
    "TTFT: search and prefill; TPOT: median of the steps but the first (mean where tokens were drafted); tokens/s:"
    " search, prefill and decode inside; KV: of the whole batch; peak: of decoding, and to weights + KV; roof: what the"
    " roofline predicts"
)
#: columns of the CSV: name -> keys into a point's figures
COLUMNS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "ttft_s": ("ttft_s",),
    "search_s": ("search_s",),
    "prefill_s": ("prefill_s",),
    "first_step_s": ("first_step_s",),
    **{f"tpot_{name}_s": ("tpot_s", name) for name in ("median", "mean", "p10", "p90", "p99")},
    "tokens_per_s": ("tokens_per_s",),
    "peak_prefill": ("peak_prefill",),
    "peak_decode": ("peak_decode",),
    "weights": ("weights",),
    "kv_used": ("kv_used",),
    "kv_reserved": ("kv_reserved",),
    "kv_ratio": ("kv_ratio",),
    "over_used": ("over_used",),
    "over_reserved": ("over_reserved",),
    "capture_s": ("capture_s",),
    "stepping": ("stepping",),
    **{name: ("speculation", name) for name in ("rounds", "drafted", "accepted")},
    "path": ("path",),
    **{
        f"predicted_{name}": ("predicted", name)
        for name in ("ttft_s", "tpot_s", "expected_tpot_s", "peak_prefill", "peak_decode")
    },
    **{f"{name}_vs_fp16": ("vs_fp16", name) for name in ("ttft_s", "tpot_s", "tokens_per_s", "peak_decode")},
    "bytes_asked": ("bytes_asked",),
}


def grid(runs: Sequence[Metrics], labels: Sequence[str]) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells."""
    body = []
    for run, label in zip(runs, labels, strict=True):
        for prompt, batch, figures in each(run):
            body.append([Cell(label), Cell(str(prompt)), Cell(str(batch)), *_cells(figures)])
            label = ""
        if label:  # a run without a point: it failed
            body.append([Cell(label, str(run["status"])), *[Cell("-")] * (len(HEAD) - 1)])
    return list(HEAD), body


def _cells(figures: Mapping[str, Any]) -> list[Cell]:
    if figures["status"] != "ok":
        asked = figures.get("bytes_asked")
        return [Cell("oom", "" if asked is None else f"{size(asked)} more"), *[Cell("-")] * (len(HEAD) - 4)]
    roof, pair, ratio = figures["predicted"] or {}, figures.get("vs_fp16") or {}, figures["over_used"]
    search = figures["search_s"]
    return [
        Cell(seconds(figures["ttft_s"]), f"search {seconds(search)}" if search else _roof(roof.get("ttft_s"))),
        Cell(seconds(figures["tpot_s"]["median"]), _roof(roof.get("tpot_s"))),
        Cell(f"{figures['tokens_per_s']:.4g}", f"{pair['tokens_per_s']:.2f}x fp16" if pair else ""),
        Cell(size(figures["kv_used"]), "" if figures["kv_ratio"] is None else f"{figures['kv_ratio']:.2f}x less"),
        Cell(size(figures["peak_decode"]), "" if ratio is None else f"{ratio:.3f} of both"),
        Cell(str(figures["stepping"]).split(" (", 1)[0]),
    ]


def notes(runs: Sequence[Metrics]) -> list[str]:
    """What a reader must know beside the numbers."""
    beyond = {figures["beyond"] for run in runs for _, _, figures in each(run) if figures.get("beyond")}
    if not beyond:
        return [NOTE]
    limits = ", ".join(map(str, sorted(beyond)))
    return [NOTE, f"some sequences are longer than model.max_length={limits}: random weights know no positions"]


def _roof(value: float | None) -> str:
    return "" if value is None else f"roof {seconds(value)}"


def to_csv(runs: Sequence[Metrics], labels: Sequence[str]) -> str:
    """One line per point with plain numbers (bytes, seconds)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["run", "run_id", "model", "device", "prompt", "batch", *COLUMNS])
    for run, label in zip(runs, labels, strict=True):
        start = [label, run["run_id"], run["config"]["model"], run["env"].get("device_name")]
        for prompt, batch, figures in each(run):
            writer.writerow([*start, prompt, batch, *(value_of(figures, keys) for keys in COLUMNS.values())])
    return buffer.getvalue()


def value_of(figures: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """A nested value, None where it is not there."""
    found: Any = figures
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
