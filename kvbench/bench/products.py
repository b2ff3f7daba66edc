"""``python -m kvbench.bench products``: linear layers of a decode step, with 16-bit and with 4-bit weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.bench import ceiling, product_ways, report
from kvbench.bench.choices import shape_of
from kvbench.bench.clock import Time, copies, replayed
from kvbench.bench.product_ways import Way
from kvbench.errors import KvbenchError
from kvbench.linear import int4
from kvbench.profiling.roofline import Shape
from kvbench.util.table import render_table

HEAD = ("model", "product", "channels", "columns", "rows", "bits", "by", "us", "+-%", "GB/s", "% read", "error")
#: input channels of a 4-bit matrix that share a scale
GROUP = 128


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the shape ``(channels, columns)`` of each weight matrix of a decoder layer and of the head, by name.

    Matrices with the same input (queries, keys and values; gate and up) are stacked and count as one.
    """
    queries, keys = shape.query_heads * shape.channels, shape.heads * shape.channels
    return {
        "queries, keys, values": (queries + 2 * keys, shape.hidden),
        "output": (shape.hidden, queries),
        "gate, up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocabulary, shape.hidden),
    }


@torch.inference_mode()
def run_products(args: argparse.Namespace) -> int:
    """Time the products of every model, write the JSON file and print the table.

    The exit status is 0 on success, 1 if a measurement failed, and 2 if a model is unknown.
    """
    try:
        models = args.models[:1] if args.quick else args.models
        shapes = {Path(model).stem: shape_of(model) for model in models}
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    reads = ceiling.measure_ceiling(0.1 if args.quick else 0.3)
    name = torch.cuda.get_device_name(0)
    print(f"{name}, {args.dtype}: plain reads {reads.rate:.0f} GB/s ({reads.kernel})", flush=True)
    path = report.result_folder(args.out) / f"{args.name or 'products'}.json"
    start = {"what": "products of a few rows with a weight matrix", **report.machine(), "ceiling": reads.as_dict()}
    rows: list[dict[str, Any]] = []
    for model, shape in shapes.items():
        for what, (channels, columns) in products(shape).items():
            row = {"model": model, "product": what, "channels": channels, "columns": columns}
            rows += [row | figures for figures in compared(channels, columns, args)]
            report.write_json(path, {**start, "dtype": args.dtype, "rows": rows})
            torch.cuda.empty_cache()
    steps = [step for model, shape in shapes.items() for step in whole_steps(model, shape, rows)]
    report.write_json(path, {**start, "dtype": args.dtype, "rows": rows, "steps": steps})
    print("\n" + render_table(HEAD, [product_cells(row, reads.rate) for row in rows], HEAD.index("us")))
    steps_head = ("model", "rows", "bits", "by", "ms of a step")
    print(
        "\n"
        + render_table(steps_head, [[step[key] for key in ("model", "rows", "bits", "by", "ms")] for step in steps], 4)
    )
    print(
        "us: median time of a captured product, each with a different matrix; error: root mean square, relative to the "
        f"output; ms of a step: all products of all layers and the head\n{path}"
    )
    return int(any("failed" in row for row in rows))


def compared(channels: int, columns: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every implementation of one product, and return a row of figures for each and each number of rows.

    If the matrices do not fit into memory, a single row says so. `channels` are those of the output, `columns` those of
    the input.
    """
    rows = []
    dtype = getattr(torch, args.dtype)
    torch._dynamo.reset()  # torch.compile stops recompiling a function after a few shapes
    for bits in args.bits:
        try:
            ways, exact = prepared(bits, channels, columns, dtype, args.compiled)
            for way in ways:
                for count in args.rows:
                    x = product_ways.random_matrix(count, columns, dtype, 99, 1.0)
                    row = {"rows": count, "bits": bits, "by": way.by, **measure_product(way, x, exact, args.seconds)}
                    rows.append(row)
                    label = f"{channels} x {columns}, {bits} bits, {count} rows, {way.by}"
                    print(f"{label}: {row.get('us') or row['failed']}", flush=True)
        except torch.OutOfMemoryError as error:
            reason = f"the matrices do not fit into memory: {' '.join(str(error).split())[:120]}"
            rows.append({"rows": None, "bits": bits, "by": "any", "failed": reason})
    return rows


def prepared(
    bits: int, channels: int, columns: int, dtype: torch.dtype, compiled: bool
) -> tuple[Iterator[Way], Tensor]:
    """Return the implementations for weights of `bits` bits, and the first of their matrices in fp32."""
    number = max(copies(channels * columns * bits // 8), 8 if bits == 16 else 2)
    if bits == 16:
        weights = [product_ways.random_matrix(channels, columns, dtype, seed) for seed in range(number)]
        return product_ways.half_precision(weights, compiled), weights[0].float()
    packed = [product_ways.random_int4(channels, columns, GROUP, seed) for seed in range(number)]
    return product_ways.four_bits(packed), int4.dequantized(packed[0], torch.float32)


def measure_product(way: Way, x: Tensor, exact: Tensor, seconds: float) -> dict[str, Any]:
    """Check and time one implementation of a product, given an input and the first of its matrices in fp32.

    Returns:
        The times, ``bytes`` of the weights and ``error``, the root mean square of the error relative to that of the
        output. If the implementation fails or is inaccurate, only ``failed``, the reason as text.
    """
    try:
        wanted = x.float() @ exact.T
        error = ((way.call(x, way.matrices[0]).float() - wanted).norm() / wanted.norm()).item()
        time: Time = replayed([partial(way.call, x, matrix) for matrix in way.matrices], seconds)
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"}
    if not error <= way.tolerance:  # NaN too
        return {"failed": f"differs by {error:.3g} of the output, {time.us:.3g} us"}
    times = {"us": time.us, "p10": time.p10, "p90": time.p90, "rounds_timed": time.rounds}
    return {**times, "bytes": way.size, "error": error}


def whole_steps(model: str, shape: Shape, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each implementation and number of rows the time of all products of a step, in milliseconds.

    An implementation that lacks one of the products (:func:`compared`) has no entry.
    """
    times: dict[tuple[int, int, str], dict[str, float]] = {}
    for row in rows:
        if row["model"] == model and "us" in row:
            times.setdefault((row["rows"], row["bits"], row["by"]), {})[row["product"]] = row["us"]
    number = {what: 1 if what == "head" else shape.layers for what in products(shape)}
    return [
        {
            "model": model,
            "rows": count,
            "bits": bits,
            "by": by,
            "ms": sum(number[what] * us for what, us in by_product.items()) / 1e3,
        }
        for (count, bits, by), by_product in sorted(times.items())
        if by_product.keys() == number.keys()
    ]


def product_cells(row: dict[str, Any], rate: float) -> list[object]:
    """Return one line of the table as cells; `rate` is the bandwidth of plain reads, GB/s."""
    start = [row[key] for key in HEAD[:7]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    speed = row["bytes"] / row["us"] / 1e3
    return [*start, row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, 100 * speed / rate, row["error"]]
