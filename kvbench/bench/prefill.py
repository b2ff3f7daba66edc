"""``python -m kvbench.bench prefill``: time and peak of the prompt beside stock transformers', in the same run."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from kvbench.bench import stock
from kvbench.bench.settings import Setting
from kvbench.bench.shapes import short
from kvbench.bench.whole import Bench, gib, ms
from kvbench.decoding.passes import prefill
from kvbench.measure.meter import Meter, fresh_search
from kvbench.measure.point_figures import weight_bytes
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.profiling.timing import median, now

HEAD = "setting|B|context|search ms|ms|stock ms|x|peak|stock peak|weights|KV|above|layer K/V|said".split("|")


def run(args: argparse.Namespace) -> int:
    """All contexts × batches: stock first, then every setting."""
    bench = Bench(
        args, "prefill of a whole model, logits of the last position; stock: transformers, sdpa, DynamicCache"
    )
    bench.check_lengths(args.contexts, 1)
    for context in args.contexts:
        for batch in args.batches:
            beside = None if args.no_stock else measured_stock(bench, context, batch)
            for each in bench.settings:
                row: dict[str, Any] = {"setting": each.text, "batch": batch, "context": context}
                try:
                    row |= {"status": "ok", **measured(bench, each, context, batch)}
                except Exception as error:
                    row |= bench.failed(error)
                release(bench.device)
                if beside and beside["status"] == "ok":
                    row |= {"stock_s": beside["seconds"], "stock_peak": beside["peak"]}
                    if row["status"] == "ok":
                        row["over_stock"] = row["seconds"] / beside["seconds"]
                elif beside:
                    row["stock"] = beside
                each.method.detach(bench.model)
                bench.add(row, line(row))
    notes = [
        "GiB; medians. x: time to stock's, the search apart; above: peak less weights and the buffers of the cache;"
        " layer K/V: fresh keys and values of one layer"
    ]
    return bench.finish(HEAD, [line(row) for row in bench.rows], notes)


def measured_stock(bench: Bench, context: int, batch: int) -> dict[str, Any]:
    """Stock transformers at one point, the first repetition left out."""
    try:
        meter = bench.meter(bench.settings[0], new_tokens=2)
        with stock.stock(bench.model):
            ids = meter.batch(context, batch)[0]
            found = []
            for _ in range(bench.args.repeats + 1):
                release(bench.device)
                found.append(stock.prefill(bench.model, ids))
        return {
            "status": "ok",
            "seconds": median([one["seconds"] for one in found[1:]]),
            "peak": max((one["peak"] for one in found if one["peak"] is not None), default=None),
        }
    except Exception as error:
        failed = bench.failed(error)
    release(bench.device)
    return failed


def measured(bench: Bench, each: Setting, context: int, batch: int) -> dict[str, Any]:
    """One setting at one point: medians over the repetitions but the first."""
    meter = bench.meter(each, new_tokens=2)
    ids, told = meter.batch(context, batch)
    found = [once(bench, meter, ids, told, census=not number) for number in range(bench.args.repeats + 1)]
    last = found[-1]
    sizes = {key: last[key] for key in ("kv_used", "kv_reserved")}
    weights, peaks = weight_bytes(bench.model), [one["peak"] for one in found if one["peak"] is not None]
    peak = max(peaks, default=None)
    shape = bench.loaded.architecture
    width = torch.empty((), dtype=bench.loaded.dtype).element_size()
    return {
        "seconds": median([one["seconds"] for one in found[1:]]),
        "search_s": median([one["search_s"] for one in found[1:]]),
        "first_s": found[0]["seconds"],
        "repeats": len(found) - 1,
        "peak": peak,
        "weights": weights,
        **sizes,
        "above": None if peak is None else peak - weights - last["kv_reserved"],
        "layer_kv": 2 * batch * shape.kv_heads * context * shape.head_dim * width,
        "path": last["path"],
    }


@torch.inference_mode()
def once(bench: Bench, meter: Meter, ids: Tensor, told: Any, census: bool) -> dict[str, Any]:
    """One prefill with a cache of its own; a CPU's peak comes of a `census` of live tensors, which is slow."""
    release(bench.device)
    peaks = PhasePeaks(bench.device, census=census)
    with fresh_search(meter.method), peaks.run():
        cache = meter.method.new_cache(bench.model, told, max_length=ids.shape[1] + bench.args.new_tokens)
        cache.options = meter.how.options
        peaks.phase("prefill")
        started = now(bench.device)
        prefill(bench.model, cache, ids, None, bench.args.prefill_chunk, bench.args.prefill_rows).argmax(-1)
        seconds = now(bench.device) - started
        peaks.phase("end")
    bill = cache.bill()
    return {
        "seconds": seconds,
        "search_s": cache.search_s,
        "peak": peaks.row()["prefill"],
        "kv_used": bill.used.total,
        "kv_reserved": bill.reserved.total,
        "path": cache.progress.prefill.path,
    }


def line(row: dict[str, Any]) -> list[object]:
    """A row of the table."""
    start = [row["setting"], row["batch"], short(row["context"])]
    beside = [ms(row.get("stock_s")), row.get("over_stock")]
    if row["status"] != "ok":
        said = row["status"] if row["status"] == "oom" else row["message"]
        return [*start, None, None, *beside, None, gib(row.get("stock_peak")), *[None] * 4, said]
    sizes = [gib(row["peak"]), gib(row.get("stock_peak"))]
    sizes += [gib(row[key]) for key in ("weights", "kv_used", "above", "layer_kv")]
    said = "" if "stock" not in row else f"stock: {row['stock']['status']}"
    return [*start, ms(row["search_s"]), ms(row["seconds"]), *beside, *sizes, " ".join((row["path"], said)).strip()]
