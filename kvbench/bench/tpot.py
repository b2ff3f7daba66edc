"""``python -m kvbench.bench tpot``: seconds a token of whole models, beside stock transformers and the roofline."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

from kvbench.bench import stock
from kvbench.bench.settings import Setting
from kvbench.bench.shapes import short
from kvbench.bench.whole import Bench, gib, ms
from kvbench.measure.meter import Meter
from kvbench.profiling.device import device_name
from kvbench.profiling.gpus import gpu_of
from kvbench.profiling.memory import release
from kvbench.profiling.roofline import Shape, predict

HEAD = "setting|B|context|TPOT ms|p10|p90|first|roof|x|expected|GB/s|% read|same|peak|steps".split("|")


def run(args: argparse.Namespace) -> int:
    """All contexts × batches: the baselines, then every setting, captured and (where asked for) eager."""
    bench = Bench(args, "decode steps of whole models: median, p10, p90; the first step and captures apart")
    bench.check_lengths(args.contexts, args.steps + 1)
    rate = None
    if bench.device.type == "cuda" and not args.no_ceiling:
        from kvbench.bench import ceiling

        reads = ceiling.measure()
        rate = reads.rate
        bench.extra["ceiling"] = reads.as_dict()
        release(bench.device)
    ways = [graphs for graphs in ("always", "never") if graphs == "never" or not args.eager_only]
    ways = ways if args.eager or args.eager_only else ways[:1]
    for context, batch in product(args.contexts, args.batches):
        point = {"batch": batch, "context": context, "steps": args.steps, "fill": args.fill}
        for name in args.baselines:
            row = {"setting": name, **point, **attempt(bench, baseline, bench, name, context, batch)}
            judged(bench, row, rate)
            bench.add(row, line(row))
        for each, graphs in product(bench.settings, ways):
            row = {"setting": each.text, **point, "graphs": graphs, "compile": args.compile}
            row |= attempt(bench, measured, bench, each, graphs, context, batch)
            each.method.detach(bench.model)
            judged(bench, row, rate)
            bench.add(row, line(row))
    notes = [
        "same: tokens alike, captured and eager, of those compared; x: TPOT to the roofline's; expected: the roofline"
        " and what the kernels of a compiled step take beside their bytes; GB/s: weights (without the embedding table)"
        " and keys and values in use over TPOT; peak: GiB while decoding"
    ]
    return bench.finish(HEAD, [line(row) for row in bench.rows], notes)


def attempt(bench: Bench, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Figures, or why there are none."""
    release(bench.device)
    try:
        return {"status": "ok", **function(*arguments)}
    except Exception as error:
        failed = bench.failed(error)
    release(bench.device)
    return failed


def measured(bench: Bench, each: Setting, graphs: str, context: int, batch: int) -> dict[str, Any]:
    """One setting at one point."""
    args = bench.args
    meter: Meter = bench.meter(
        each, new_tokens=args.steps + 1, repeats=1, graphs=graphs, compile=args.compile, fill=args.fill, census=False
    )
    figures = meter.point(context, batch)
    tokens = meter.tokens
    if figures["status"] == "ok" and args.check and figures["stepping"].startswith("graph"):
        count = min(args.check, args.steps + 1)
        eager = meter.first_tokens(context, batch, count)
        pairs = [(a, b) for mine, other in zip(tokens, eager, strict=True) for a, b in zip(mine, other, strict=False)]
        figures["same"] = {"of": len(pairs), "alike": sum(a == b for a, b in pairs)}
    if (
        figures["status"] == "ok"
        and args.profile
        and figures["stepping"].startswith("graph")
        and not each.method.speculation
    ):
        from kvbench.bench.profile import profile

        told = meter.batch(context, batch)[1]
        figures["profile"] = profile(
            bench.model, each.method, context, batch, prompts=told, compile=args.compile, seed=args.seed
        )
    figures.pop("note", None)
    figures["tokens"] = tokens[0][: stock.SHOWN] if tokens else []
    if figures["status"] == "ok":
        figures |= {"kv": figures["kv_used"]["total"], "peak_decode": figures["peak"]["decode"]}
    return figures


def baseline(bench: Bench, name: str, context: int, batch: int) -> dict[str, Any]:
    """Stock transformers at one point."""
    args = bench.args
    meter = bench.meter(bench.settings[0], new_tokens=2)
    ids = meter.batch(context, batch)[0]
    with stock.stock(bench.model):
        stock.compiled_anew()
        try:
            found = stock.decode(name, bench.model, ids, args.steps, args.fill, args.seed)
        finally:
            stock.compiled_anew()
    shape = bench.loaded.architecture
    bits = int(name[-1]) if name[-1].isdecimal() else 8 * bench.loaded.dtype.itemsize
    kv = 2 * batch * shape.layers * shape.kv_heads * shape.head_dim * context * bits // 8
    return {**found, "kv": kv, "stepping": stock.BASELINES[name], "predicted": None}


def judged(bench: Bench, row: dict[str, Any], rate: float | None) -> None:
    """Beside a row what it reads a second, and the roofline's time where it has none yet.

    Args:
        rate: GB/s of plain reads; None: not measured.
    """
    if row["status"] != "ok":
        return
    shape = Shape.of(bench.model.config.get_text_config(decoder=True))
    weights = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    row["read_bytes"] = round(shape.bytes_read(weights, bench.loaded.dtype.itemsize) + row["kv"])
    median = row["tpot_s"]["median"]
    if not row.get("speculation"):
        row["GB_s"] = row["read_bytes"] / median / 1e9
        row["read_share"] = row["GB_s"] / rate if rate else None
    name = device_name(bench.device)
    gpu = gpu_of(name) if name else None
    if row.get("predicted") is None and gpu is not None:
        found = predict(shape, row["kv"], weights, row["batch"], row["context"], gpu)
        row["predicted"] = {
            "gpu": gpu.name,
            "tpot_s": found.tpot_s,
            "expected_tpot_s": found.expected_tpot_s,
            "bound": found.bound,
        }
    roof = (row.get("predicted") or {}).get("tpot_s")
    row["over_roof"] = median / roof if roof else None


def line(row: dict[str, Any]) -> list[object]:
    """A row of the table."""
    start = [row["setting"], row["batch"], short(row["context"])]
    if row["status"] != "ok":
        said = "oom" if row["status"] == "oom" else row["message"]
        return [*start, *[None] * (len(HEAD) - len(start) - 1), said]
    said = row.get("predicted") or {}
    tpot, roof = row["tpot_s"], said.get("tpot_s")
    times = [ms(tpot["median"]), ms(tpot["p10"]), ms(tpot["p90"]), ms(row.get("first_step_s")), ms(roof)]
    expected = ms(said.get("expected_tpot_s"))
    share = None if row.get("read_share") is None else 100 * row["read_share"]
    same = "-" if "same" not in row else f"{row['same']['alike']}/{row['same']['of']}"
    speeds = [row["over_roof"], expected, row.get("GB_s"), share, same, gib(row.get("peak_decode"))]
    return [*start, *times, *speeds, row["stepping"]]
