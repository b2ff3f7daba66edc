"""``python -m kvbench.bench products``: linear layers of a decode step at batch 1, by kvbench's kernel and by torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.bench import ceiling, report
from kvbench.bench.choices import shape_of
from kvbench.bench.clock import Time, copies, replayed
from kvbench.errors import KvbenchError
from kvbench.linear import matvec
from kvbench.profiling.roofline import Shape
from kvbench.util.table import table

HEAD = ("model", "product", "rows", "columns", "by", "us", "+-%", "GB/s", "% read", "error")
#: largest acceptable error, relative to the largest output: a few roundings of bf16
TOLERANCE = 2e-2


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the shape ``(rows, columns)`` of each weight matrix of a decoder layer, by name.

    Matrices with the same input (queries, keys and values; gate and up) are stacked and count as one.
    """
    queries, keys = shape.query_heads * shape.channels, shape.heads * shape.channels
    return {
        "queries, keys, values": (queries + 2 * keys, shape.hidden),
        "output": (shape.hidden, queries),
        "gate, up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def ways(compiled: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the implementations of a matrix-vector product to compare, by name.

    Each is a function of an input ``[1, 1, columns]`` and a weight matrix ``[rows, columns]``.

    Args:
        compiled: True to include the implementation that torch.compile chooses.
    """
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "kernel": matvec.launch,
        "torch (library)": torch.nn.functional.linear,
    }
    if compiled:
        ways["torch.compile, tuned"] = torch.compile(
            lambda x, weight: torch.nn.functional.linear(x, weight),
            dynamic=False,
            options={"coordinate_descent_tuning": True},
        )
    return ways


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Time the matrix-vector products of every model's decoder layer, write the JSON file and print the table.

    Returns:
        The exit status: 0 on success, 1 if a measurement failed, and 2 if a model is unknown.
    """
    dtype = getattr(torch, args.dtype)
    try:
        models = args.models[:1] if args.quick else args.models
        shapes = {Path(model).stem: products(shape_of(model)) for model in models}
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    reads = ceiling.measure(0.1 if args.quick else 0.3)
    name = torch.cuda.get_device_name(0)
    print(f"{name}, {args.dtype}: plain reads {reads.rate:.0f} GB/s ({reads.kernel})", flush=True)
    path = report.folder(args.out) / f"{args.name or 'products'}.json"
    start = {"what": "products of a matrix and a vector", **report.machine(), "ceiling": reads.as_dict()}
    rows: list[dict[str, Any]] = []
    for (model, shape), what in [(each, what) for each in shapes.items() for what in each[1]]:
        count, columns = shape[what]
        row = {"model": model, "product": what, "rows": count, "columns": columns}
        rows += [row | each for each in compared(count, columns, dtype, args)]
        report.write(path, {**start, "dtype": args.dtype, "rows": rows})
        torch.cuda.empty_cache()
    print("\n" + table(HEAD, [line(row, reads.rate) for row in rows], HEAD.index("us")))
    print(
        "us: median time of a captured product, each with a different matrix; error: relative to the "
        f"largest output\n{path}"
    )
    return int(any("failed" in row for row in rows))


def compared(count: int, columns: int, dtype: torch.dtype, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every implementation of one matrix-vector product, and return a row of figures for each.

    If the matrices do not fit into memory, a single row says so.

    Args:
        count: rows of the weight matrix: output channels.
        columns: columns of the weight matrix: input channels.
        dtype: dtype of weights and input.
        args: options of the command line.
    """
    try:
        weights = [one(count, columns, dtype, seed) for seed in range(max(copies(2 * count * columns), 8))]
    except torch.OutOfMemoryError as error:
        return [{"by": "any", "failed": f"the matrices do not fit into memory: {' '.join(str(error).split())[:120]}"}]
    x = one(1, columns, dtype, 99, scale=1.0)[None]
    exact = weights[0].float() @ x[0, 0].float()
    torch._dynamo.reset()  # torch.compile stops recompiling a function after a few shapes
    rows = []
    for by, way in ways(args.compiled).items():
        rows.append({"by": by, **measured(way, x, weights, exact, args.seconds)})
        print(f"{count} x {columns}, {by}: {rows[-1].get('us') or rows[-1]['failed']}", flush=True)
    return rows


def one(rows: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 0.02) -> Tensor:
    """Return a random matrix ``[rows, columns]`` with standard deviation `scale`, on the GPU."""
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, columns, generator=rng, device="cuda") * scale).to(dtype)


def measured(
    way: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor], exact: Tensor, seconds: float
) -> dict[str, Any]:
    """Check and time one implementation of a matrix-vector product.

    Args:
        way: the implementation, one of :func:`ways`.
        x: input, ``[1, 1, columns]``.
        weights: matrices ``[rows, columns]``, one per call in the CUDA graph that is timed.
        exact: exact product of ``weights[0]`` and `x`, fp32 ``[rows]``.
        seconds: measuring time.

    Returns:
        ``us``, ``p10``, ``p90`` and ``rounds`` (:class:`kvbench.bench.clock.Time`), ``bytes`` of the weights and
        ``error``, the largest error relative to the largest output. If the implementation fails or is inaccurate, only
        ``failed``, the reason as text.
    """
    try:
        error = ((way(x, weights[0])[0, 0].float() - exact).abs().max() / exact.abs().max()).item()
        time: Time = replayed([partial(way, x, weight) for weight in weights], seconds)
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"}
    if not error <= TOLERANCE:  # NaN too
        return {"failed": f"differs by {error:.3g} of the largest output, {time.us:.3g} us"}
    size = weights[0].numel() * weights[0].element_size()
    return {"us": time.us, "p10": time.p10, "p90": time.p90, "rounds": time.rounds, "bytes": size, "error": error}


def line(row: dict[str, Any], rate: float) -> list[object]:
    """Return one line of the table as cells.

    Args:
        row: figures of one implementation, or the reason why it failed.
        rate: bandwidth of plain reads, GB/s.
    """
    start = [row[key] for key in ("model", "product", "rows", "columns", "by")]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    speed = row["bytes"] / row["us"] / 1e3
    return [*start, row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, 100 * speed / rate, row["error"]]
