"""``python -m kvbench.bench kernel``: decode attention over packed layers, compared with torch's SDPA in one run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.attention import fused, synthetic
from kvbench.attention.phases import Part, Work
from kvbench.bench import baselines, ceiling, report
from kvbench.bench.clock import Time, copies, replayed
from kvbench.bench.shapes import (
    DEFAULT,
    FORMATS,
    FULL,
    MODELS,
    PRODUCTION,
    Point,
    layer_bytes,
    lengths,
    parse_point,
    resolved,
    short_count,
)
from kvbench.util.table import render_table

QUICK = ("7b:1:4k", "7b:1:32k", "7b:1:128k", "8b:1:32k", "8b:1:128k", "8b:1:128k:5", "tiny:1:4k")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8", "int2_g128", "mix")
#: points of ``--production``
LONG = ("7b:1:32k", "7b:1:128k", "8b:1:32k", "8b:1:128k")
#: seconds after which a quick run starts no more rows
QUICK_SECONDS = 150


def kernel_points(args: argparse.Namespace) -> list[Point]:
    """Return the points (model, batch size, tokens, new tokens) at which to measure attention.

    They are the points of ``--points``, ``--production`` or ``--quick``, else all combinations of ``--models``,
    ``--batches``, ``--q-len`` and ``--contexts``.
    """
    if args.quick or args.points or args.production:
        return [parse_point(text) for text in args.points or (LONG if args.production else QUICK)]
    return [
        Point(model, batch, context, q_len)
        for model in args.models
        for batch in args.batches
        for q_len in args.q_len
        for context in args.contexts
    ]


def make_work(name: str, at: Point, dtype: torch.dtype, device: str = "cuda") -> Work:
    """Create the input of a decode attention kernel: random keys and values of a layer in one of :data:`FORMATS`."""
    model, layer = MODELS[at.model], FORMATS[name]
    sides = []
    for side, counts in zip(("key", "value"), lengths(layer, at.context, at.q_len), strict=True):
        forms = [resolved(getattr(tier, side), model.channels) for tier in layer.tiers] + [FULL]
        sides.append([synthetic.Piece(f, [n] * at.batch) for f, n in zip(forms, counts, strict=True)])
    return synthetic.layer(
        *sides, heads=model.heads, key_dim=model.channels, value_dim=model.channels, dtype=dtype, device=device
    )


def twin(work: Work) -> Work:
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


def measure_kernel(name: str, at: Point, path: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure decode attention over one layer at one point, and return the figures as a row of the JSON file.

    They are the time, the bytes that the kernel must read, and its error relative to exact attention over the same
    codes.

    `path` is the kernel to use: ``cuda``, ``triton``, or ``auto`` for the fastest that serves the input.
    """
    dtype, model = getattr(torch, args.dtype), MODELS[at.model]
    work = make_work(name, at, dtype)
    query = torch.randn(at.batch, model.query_heads, at.q_len, model.channels, dtype=dtype, device="cuda")
    scaling = model.channels**-0.5
    served, module = fused.pick(query, work, path)  # type: ignore[arg-type]
    parts = layer_bytes(FORMATS[name], at)
    size = sum(parts.values())
    row: dict[str, Any] = {**asdict(at), "format": name, "path": served, "bytes": size, "bytes_by_format": parts}
    row["error"] = None
    if args.check_heads:
        heads = slice(0, min(args.check_heads, model.heads))
        group = model.query_heads // model.heads
        out = module.attend(query, work, scaling)[:, :, : heads.stop * group]
        row["error"] = synthetic.relative_error(out, synthetic.dequantized_attention(query, work, scaling, heads))
    works = [work] + [twin(work) for _ in range(copies(size) - 1)]
    calls: list[Callable[[], Tensor]] = [lambda w=w: module.attend(query, w, scaling) for w in works]  # type: ignore[misc]
    timing = replayed(calls, args.seconds)
    row.update(us=timing.us, p10=timing.p10, p90=timing.p90, rounds=timing.rounds, GB_s=size / timing.us / 1e3)
    return row


def expected(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Predict the time of attention over a layer of mixed formats, given the bandwidth measured for each format alone.

    The bandwidth of full-precision tokens is taken to be that of the best 16-bit baseline.

    None if the layer has a single format, or if one of its formats or the baseline was not measured at the same point.
    The result is in microseconds.
    """
    layer, at = FORMATS[row["format"]], Point(row["model"], row["batch"], row["context"], row["q_len"])
    if layer.single or not row.get("best"):
        return None
    # bytes of 16-bit keys and values per microsecond: 2 sides of 2 bytes
    exact = 4 * MODELS[at.model].heads * at.batch * at.context * MODELS[at.model].channels / row["best_us"]
    total = 0.0
    for kind, size in row["bytes_by_format"].items():
        rate: float | None = exact
        if kind != "fp16":
            tier = next(t for t in layer.tiers if f"int{t.key.bits}" == kind)
            alone = [
                r
                for r in rows
                if r.get("us")
                and (r["model"], r["batch"], r["context"], r["q_len"], r["path"])
                == (row["model"], row["batch"], row["context"], row["q_len"], row["path"])
                and FORMATS[r["format"]].single
                and (FORMATS[r["format"]].tiers[0].key, FORMATS[r["format"]].tiers[0].value) == (tier.key, tier.value)
            ]
            rate = alone[0]["bytes"] / alone[0]["us"] if alone else None
        if rate is None:
            return None
        total += size / rate
    return total


def run_kernel(args: argparse.Namespace) -> int:
    """Measure every point with every format, write the JSON file, print the table; return 1 if one failed, else 0."""
    began = time.perf_counter()
    if args.quick:
        args.seconds = min(args.seconds, 0.1)
    formats = args.formats or (PRODUCTION if args.production else QUICK_FORMATS if args.quick else DEFAULT)
    paths = ("cuda", "triton") if args.path == "both" else (args.path,)
    jobs = [(at, name, path) for at in kernel_points(args) for name in formats for path in paths]
    path = report.result_folder(args.out) / f"{args.name or 'kernel'}.json"
    print(f"{torch.cuda.get_device_name(0)}: reading ...", flush=True)
    reads = ceiling.measure_ceiling(0.1 if args.quick else 0.3)
    print(f"plain reads: {reads.rate:.0f} GB/s ({reads.kernel})", flush=True)
    rows, known = [], dict[Point, dict[str, Time | str]]()
    skipped = 0
    for number, (at, name, wanted) in enumerate(jobs):
        if number < args.skip:
            continue
        if args.quick and time.perf_counter() - began > QUICK_SECONDS:
            skipped += 1
            continue
        row: dict[str, Any] = {**asdict(at), "format": name, "path": wanted}
        try:
            if not args.no_baselines and at not in known:
                known[at] = baselines.measure_sdpa(at, getattr(torch, args.dtype), args.seconds)
                torch.cuda.empty_cache()
            row = measure_kernel(name, at, wanted, args)
        except Exception as error:  # one kernel's failure must not lose the figures of the others
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        best = baselines.fastest_backend(known.get(at, {}))
        row.update(best=best[0] if best else None, best_us=best[1] if best else None)
        if "us" in row:
            row.update(floor_us=reads.floor(row["bytes"]), ceiling_GB_s=reads.rate)
        rows.append(row)
        print("  ".join(str(c) if not isinstance(c, float) else f"{c:.4g}" for c in kernel_cells(row)), flush=True)
        if "failed" in row and not report.healthy():
            rows += rest(args, number + 1)  # this process can no longer use CUDA; a new one continues
            break
        torch.cuda.empty_cache()
    for row in rows:
        if "us" in row:
            row["expected_us"], row["per_byte"] = expected(row, rows), per_byte(row, rows)
    seen = {
        str(at): {n: asdict(t) if isinstance(t, Time) else t for n, t in timings.items()}
        for at, timings in known.items()
    }
    content = {"ceiling": reads.as_dict(), "dtype": args.dtype, "baselines": seen, "rows": rows}
    report.write_json(path, {"what": "decode attention, one layer, whole operation", **report.machine(), **content})
    if not args.skip:
        finish(rows, skipped, path, time.perf_counter() - began)
    return int(any("failed" in row for row in rows))


def rest(args: argparse.Namespace, skip: int) -> list[dict[str, Any]]:
    """Continue after the first `skip` measurements in a new process, once an error has made CUDA unusable in this one.

    The result is empty if the process wrote no file.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "kvbench.bench",
            *args.argv,
            "--out",
            folder,
            "--name",
            "rest",
            "--skip",
            str(skip),
        ]
        subprocess.run(command, check=False)
        path = Path(folder) / "rest.json"
        if not path.is_file():
            return []
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return rows


#: format with whose time per byte the others are compared
BASE = "int4_g128"
HEAD = (
    "model",
    "B",
    "tokens",
    "q",
    "format",
    "path",
    "us",
    "+-%",
    "GB/s",
    "% read",
    "floor",
    "a byte",
    "best 16 bit",
    "us",
    "x",
    "error",
)


def per_byte(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Return the time per byte read, relative to that of :data:`BASE` at the same point by the same kernel, or None."""
    same = ("model", "batch", "context", "q_len", "path")
    bases = [r for r in rows if r["format"] == BASE and r.get("us") and all(r[key] == row[key] for key in same)]
    if not bases or not row.get("us"):
        return None
    return float(row["us"] / row["bytes"] / (bases[0]["us"] / bases[0]["bytes"]))


def kernel_cells(row: dict[str, Any]) -> list[object]:
    """Return one line of the table as cells; the last is the numerical error, or why the measurement failed."""
    start = [row["model"], row["batch"], short_count(row["context"]), row["q_len"], row["format"], row.get("path", "-")]
    best, best_us = row.get("best"), row.get("best_us")
    if "us" not in row:
        return [*start, None, None, None, None, None, None, best, best_us, None, row["failed"]]
    spread = 50 * (row["p90"] - row["p10"]) / row["us"]
    ratio = best_us / row["us"] if best_us else None
    share = 100 * row["GB_s"] / row["ceiling_GB_s"]
    return [
        *start, row["us"], spread, row["GB_s"], share, row["floor_us"], row.get("per_byte"), best, best_us, ratio,
        "-" if row["error"] is None else f"{row['error']:.1e}",
    ]  # fmt: skip


def finish(rows: list[dict[str, Any]], skipped: int, path: Path, seconds: float) -> None:
    """Print the table and notes that explain it; `skipped` measurements were left out to limit the time."""
    print("\n" + render_table(HEAD, [kernel_cells(row) for row in rows], HEAD.index("us")))
    for row in rows:
        if row.get("expected_us"):
            more = 100 * (row["us"] / row["expected_us"] - 1)
            at = Point(row["model"], row["batch"], row["context"], row["q_len"])
            print(
                f"{at} {row['format']} ({row['path']}): {more:+.0f}% compared with the time of its bytes "
                "at the rates of the single formats"
            )
    if skipped:
        print(f"{skipped} rows were not measured, because --quick limits the time")
    print(
        "us: median over graph replays; +-%: half the range from p10 to p90; floor: time of a plain "
        f"read of the same bytes; a byte: microseconds per byte read, over those of {BASE} at the same point"
    )
    print(f"{path} ({seconds:.0f} s)")
