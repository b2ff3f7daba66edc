"""``python -m kvbench.bench kernel``: times of decode attention over packed layers and of torch's SDPA, in one run.

The baselines are torch's SDPA over 16-bit keys and values, with every back end that supports it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvbench.attention import fused, synthetic
from kvbench.attention.phases import Part, Work
from kvbench.bench.choices import add_timing_options, argument, positive_number, short_count, tokens
from kvbench.bench.clock import Time, copies, replayed, shown_ceiling, timed_cells
from kvbench.bench.report import Recording, failure_reason, healthy
from kvbench.bench.shapes import (
    DEFAULT,
    FORMATS,
    FULL,
    MODELS,
    PRODUCTION,
    Layer,
    Point,
    parse_point,
    resolved,
    segment_lengths,
    step_bytes,
)
from kvbench.util.table import render_table

Row = dict[str, Any]
QUICK = ("7b:1:4k", "7b:1:32k", "7b:1:128k", "8b:1:32k", "8b:1:128k", "8b:1:128k:5", "tiny:1:4k")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8", "int2_g128", "mix")
#: points of ``--production``
LONG = ("7b:1:32k", "7b:1:128k", "8b:1:32k", "8b:1:128k")
#: seconds after which a quick run starts no more rows
QUICK_SECONDS = 150
#: what distinguishes the points of two rows
AT = ("model", "batch", "context", "q_len")
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def add_kernel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kernel``."""
    add = parser.add_argument
    about = "models whose head shapes are used (default: 7b 8b)"
    add("--models", nargs="+", choices=MODELS, default=["7b", "8b"], help=about)
    add("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    add("--contexts", nargs="+", type=tokens, default=[4096, 32768, 131072], metavar="N")
    add("--batches", nargs="+", type=positive_number, default=[1], metavar="B")
    about = "new tokens per step: 1 for decoding, more for the verification of drafts"
    add("--q-len", nargs="+", type=positive_number, default=[1], metavar="Q", help=about)
    about = "measure these points instead of the whole grid"
    add("--points", nargs="+", type=argument(parse_point), metavar="MODEL:B:N[:Q]", help=about)
    about = "measure the formats of inference engines, KVarN, TurboQuant and OSCAR at 32k and 128k tokens"
    add("--production", action="store_true", help=about)
    add("--path", choices=["auto", "cuda", "triton", "both"], default="auto")
    add("--no-baselines", action="store_true", help="do not measure torch's SDPA for comparison")
    add("--check-heads", type=int, default=2, help="number of KV heads per row whose result is checked (0: none)")
    add_timing_options(parser, "float16", "data type of queries and full-precision tokens")


def kernel_points(args: argparse.Namespace) -> list[Point]:
    """Return the points (model, batch size, tokens, new tokens) at which to measure attention.

    They are the points of ``--points``, ``--production`` or ``--quick``, else all combinations of ``--models``,
    ``--batches``, ``--q-len`` and ``--contexts``.
    """
    if args.points:
        return list(args.points)
    if args.quick or args.production:
        return [parse_point(text) for text in (LONG if args.production else QUICK)]
    return [
        Point(model, batch, context, q_len)
        for model in args.models
        for batch in args.batches
        for q_len in args.q_len
        for context in args.contexts
    ]


def random_layer(name: str, at: Point, dtype: torch.dtype, device: str = "cuda") -> Work:
    """Create the input of a decode attention kernel: random keys and values of a layer in one of :data:`FORMATS`."""
    model, layer = MODELS[at.model], FORMATS[name]
    sides = []
    for side, counts in zip(("key", "value"), segment_lengths(layer, at.context, at.q_len), strict=True):
        forms = [resolved(getattr(tier, side), model.channels) for tier in layer.tiers] + [FULL]
        sides.append([synthetic.Piece(f, [n] * at.batch) for f, n in zip(forms, counts, strict=True)])
    return synthetic.layer(
        *sides, heads=model.heads, key_dim=model.channels, value_dim=model.channels, dtype=dtype, device=device
    )


def layer_twin(work: Work) -> Work:
    """Copy a kernel's input, the stored keys and values of a layer, into new buffers."""
    copies: dict[int, Part] = {}

    def copied(part: Part) -> Part:
        if id(part) not in copies:
            buffer = None if part.buffer is None else part.buffer.clone()
            copies[id(part)] = replace(
                part, words=[w.clone() for w in part.words], params=[p.clone() for p in part.params], buffer=buffer
            )
        return copies[id(part)]

    return replace(work, phases=[(copied(key), copied(value)) for key, value in work.phases])


def time_attention(name: str, at: Point, path: str, args: argparse.Namespace) -> Row:
    """Measure decode attention over one layer at one point, and return the figures as a row of the JSON file.

    They are the time, the bytes that the kernel must read, and its error relative to exact attention over the same
    codes.

    `path` is the kernel to use: ``cuda``, ``triton``, or ``auto`` for the fastest that serves the input.
    """
    dtype, model = getattr(torch, args.dtype), MODELS[at.model]
    work = random_layer(name, at, dtype)
    query = torch.randn(at.batch, model.query_heads, at.q_len, model.channels, dtype=dtype, device="cuda")
    scaling = model.channels**-0.5
    served, module = fused.pick(query, work, path)  # type: ignore[arg-type]
    parts = step_bytes(FORMATS[name], at)
    size = sum(parts.values())
    row: Row = {**asdict(at), "format": name, "path": served, "bytes": size, "bytes_by_format": parts}
    row["error"] = None
    if args.check_heads:
        heads = slice(0, min(args.check_heads, model.heads))
        group = model.query_heads // model.heads
        out = module.attend(query, work, scaling)[:, :, : heads.stop * group]
        row["error"] = synthetic.relative_error(out, synthetic.dequantized_attention(query, work, scaling, heads))
    works = [work] + [layer_twin(work) for _ in range(copies(size) - 1)]
    timing = replayed([partial(module.attend, query, each, scaling) for each in works], args.seconds)
    return row | asdict(timing) | {"GB_s": size / timing.us / 1e3}


def sdpa_step(query: Tensor, keys: Tensor, values: Tensor, backend: str, packed: bool) -> Tensor:
    """Compute the attention of one decode step with one of the back ends of torch's SDPA.

    No causal mask is applied. One new token needs none. For several new tokens the output is therefore not that of a
    causal model, but the amount of work is the same.

    `backend` is a key of :data:`BACKENDS`. With `packed`, the query heads that share a KV head are folded into the
    dimension of the new tokens, so that the back end reads each key and value once.

    Returns:
        The output in the shape of the queries: ``[B, Hq, q, D]``, or ``[B, H, Hq / H * q, D]`` if `packed`.
    """
    batch, heads, channels = query.shape[0], keys.shape[1], query.shape[3]
    if packed:
        query = query.reshape(batch, heads, -1, channels)
    with sdpa_kernel([BACKENDS[backend]]):
        return sdpa(query, keys, values, enable_gqa=query.shape[1] != heads)


def time_baselines(at: Point, dtype: torch.dtype, seconds: float) -> dict[str, Time | str]:
    """Time the attention of one decode step over random 16-bit keys and values with every back end of torch's SDPA.

    Measuring takes `seconds` per back end.

    Returns:
        For each back end, by name, its time, or the error message if it does not support these shapes. For models with
        grouped-query attention, every back end is also timed with the query heads of a group stacked along the query
        dimension (`packed` of :func:`sdpa_step`), under the name ``NAME, heads packed``.
    """
    model = MODELS[at.model]
    shape = (at.batch, model.heads, at.context, model.channels)
    size = 4 * at.batch * model.heads * at.context * model.channels
    query = torch.randn(at.batch, model.query_heads, at.q_len, model.channels, dtype=dtype, device="cuda")
    pairs = [tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)) for _ in range(copies(size))]
    times: dict[str, Time | str] = {}
    grouped = model.query_heads != model.heads
    for name in BACKENDS:
        for packed in (False, True) if grouped else (False,):
            label = f"{name}, heads packed" if packed else name
            try:
                calls = [partial(sdpa_step, query, keys, values, name, packed) for keys, values in pairs]
                times[label] = replayed(calls, seconds)
            except (RuntimeError, ValueError) as error:  # the back end does not take this shape
                times[label] = " ".join(str(error).split())[:200]
    return times


def best_baseline(measured: dict[str, Time | str]) -> tuple[str, float] | None:
    """Return the name of the fastest back end and its time in microseconds; None if none ran."""
    times = {name: time.us for name, time in measured.items() if isinstance(time, Time)}
    return min(times.items(), key=lambda item: item[1]) if times else None


def timed_alike(row: Row, rows: list[Row]) -> list[Row]:
    """Return the rows that were timed at the same point by the same kernel as `row`."""
    return [other for other in rows if other.get("us") and all(other[key] == row[key] for key in (*AT, "path"))]


def expected_us(row: Row, rows: list[Row]) -> float | None:
    """Predict the time of attention over a layer of mixed formats, given the bandwidth measured for each format alone.

    The bandwidth of full-precision tokens is taken to be that of the best 16-bit baseline.

    None if the layer has a single format, or if one of its formats or the baseline was not measured at the same point.
    The result is in microseconds.
    """
    layer, at = FORMATS[row["format"]], Point(*(row[key] for key in AT))
    if layer.single or not row.get("best"):
        return None
    # bytes of 16-bit keys and values per microsecond: 2 sides of 2 bytes
    exact = 4 * MODELS[at.model].heads * at.batch * at.context * MODELS[at.model].channels / row["best_us"]
    total = 0.0
    for kind, size in row["bytes_by_format"].items():
        rate: float | None = exact
        if kind != "fp16":
            tier = next(t for t in layer.tiers if f"int{t.key.bits}" == kind)
            wanted = Layer((replace(tier, share=1.0),))  # the same format alone
            alone = next((r for r in timed_alike(row, rows) if FORMATS[r["format"]] == wanted), None)
            rate = alone["bytes"] / alone["us"] if alone else None
        if rate is None:
            return None
        total += size / rate
    return total


def time_kernels(args: argparse.Namespace) -> int:
    """Measure every point with every format, write the JSON file, print the table; return 1 if one failed, else 0."""
    if args.quick:
        args.seconds = min(args.seconds, 0.1)
    formats = args.formats or (PRODUCTION if args.production else QUICK_FORMATS if args.quick else DEFAULT)
    paths = ("cuda", "triton") if args.path == "both" else (args.path,)
    jobs = [(at, name, path) for at in kernel_points(args) for name in formats for path in paths]
    file = Recording(args, "kernel", "decode attention, one layer, whole operation")
    rows, reads = file.rows, shown_ceiling(args)
    known = dict[Point, dict[str, Time | str]]()
    skipped = 0
    for index, (at, name, wanted) in enumerate(jobs):
        if index < args.skip:
            continue
        if args.quick and time.perf_counter() - file.began > QUICK_SECONDS:
            skipped += 1
            continue
        row: Row = {**asdict(at), "format": name, "path": wanted}
        try:
            if not args.no_baselines and at not in known:
                known[at] = time_baselines(at, getattr(torch, args.dtype), args.seconds)
                torch.cuda.empty_cache()
            row = time_attention(name, at, wanted, args)
        except Exception as error:  # one kernel's failure must not lose the figures of the others
            row["failed"] = failure_reason(error, 160)
        best = best_baseline(known.get(at, {}))
        row.update(best=best[0] if best else None, best_us=best[1] if best else None)
        if "us" in row:
            row.update(floor_us=reads.floor(row["bytes"]), ceiling_GB_s=reads.rate)
        rows.append(row)
        file.say(kernel_cells(row))
        if "failed" in row and not healthy():
            rows += continued_rows(args, index + 1)  # this process can no longer use CUDA; a new one continues
            break
        torch.cuda.empty_cache()
    for row in rows:
        if "us" in row:
            row["expected_us"], row["per_byte"] = expected_us(row, rows), per_byte(row, rows)
    seen = {
        str(at): {n: asdict(t) if isinstance(t, Time) else t for n, t in timings.items()}
        for at, timings in known.items()
    }
    file.about |= {"ceiling": reads.as_dict(), "dtype": args.dtype, "baselines": seen}
    file.write()
    if not args.skip:
        print_kernels(file, skipped)
    return int(any("failed" in row for row in rows))


def continued_rows(args: argparse.Namespace, skip: int) -> list[Row]:
    """Continue after the first `skip` measurements in a new process, once an error has made CUDA unusable in this one.

    The result is empty if the process wrote no file.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = ["--out", folder, "--name", "rest", "--skip", str(skip)]
        subprocess.run([sys.executable, "-m", "kvbench.bench", *args.argv, *own], check=False)
        path = Path(folder) / "rest.json"
        return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


#: format with whose time per byte the others are compared
BASE = "int4_g128"
HEAD = (
    *("model", "B", "tokens", "q", "format", "path", "us", "+-%", "GB/s", "% read", "floor", "a byte"),
    *("best 16 bit", "us", "x", "error"),
)


def per_byte(row: Row, rows: list[Row]) -> float | None:
    """Return the time per byte read, divided by that of :data:`BASE` for the same point and kernel; None if unknown."""
    bases = [other for other in timed_alike(row, rows) if other["format"] == BASE]
    if not bases or not row.get("us"):
        return None
    return float(row["us"] / row["bytes"] / (bases[0]["us"] / bases[0]["bytes"]))


def kernel_cells(row: Row) -> list[object]:
    """Return one line of the table as cells; the last is the numerical error, or why the measurement failed."""
    start = [row["model"], row["batch"], short_count(row["context"]), row["q_len"], row["format"], row.get("path", "-")]
    best, best_us = row.get("best"), row.get("best_us")
    if "us" not in row:
        return [*start, *[None] * 6, best, best_us, None, row["failed"]]
    figures = [*timed_cells(row, row["ceiling_GB_s"]), row["floor_us"], row.get("per_byte")]
    error = "-" if row["error"] is None else f"{row['error']:.1e}"
    return [*start, *figures, best, best_us, best_us / row["us"] if best_us else None, error]


def print_kernels(file: Recording, skipped: int) -> None:
    """Print the table and notes that explain it; `skipped` measurements were left out to limit the time."""
    print("\n" + render_table(HEAD, [kernel_cells(row) for row in file.rows], HEAD.index("us")))
    for row in file.rows:
        if row.get("expected_us"):
            more = 100 * (row["us"] / row["expected_us"] - 1)
            print(
                f"{Point(*(row[key] for key in AT))} {row['format']} ({row['path']}): {more:+.0f}% compared with the "
                "time of its bytes at the rates of the single formats"
            )
    if skipped:
        print(f"{skipped} rows were not measured, because --quick limits the time")
    print(
        "us: median over graph replays; +-%: half the range from p10 to p90; floor: time of a plain "
        f"read of the same bytes; a byte: microseconds per byte read, over those of {BASE} at the same point"
    )
    file.end()
