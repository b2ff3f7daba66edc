"""``python -m kvbench.bench quantize``: times of quantizing and packing keys and values, in prefill and decoding."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from kvbench.bench import ceiling, report
from kvbench.bench.clock import Time, eager, replayed
from kvbench.bench.packing import both, equal, measure_flush, others, timed_flushes, torchs_way, traffic, warps
from kvbench.bench.shapes import Point, short_count
from kvbench.util.table import render_table

DEFAULT = ("int4_g128", "int4_g32", "int2_g32", "int8", "atom4")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8")
HEAD = ("model", "tokens", "format", "what", "us", "+-%", "GB/s", "% read", "same as torch")
FLUSH = ("model", "tokens held", "format", "flush", "GPU us", "called us", "torch us")


def run_quantize(args: argparse.Namespace) -> int:
    """Time the packing of whole layers and of :func:`timed_flushes`, write the JSON file and print two tables.

    The exit status is 1 if a measurement of kvbench's kernel failed or its result differs from torch's, else 0.
    """
    dtype = getattr(torch, args.dtype)
    if args.quick:
        args.seconds, args.contexts = min(args.seconds, 0.1), [4096, 32768]
    formats = args.formats or (QUICK_FORMATS if args.quick else DEFAULT)
    reads = ceiling.measure_ceiling(0.1 if args.quick else 0.3)
    print(
        f"{torch.cuda.get_device_name(0)}, {args.dtype}: plain reads {reads.rate:.0f} GB/s ({reads.kernel})", flush=True
    )
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for format in formats:
            try:
                same: object = equal(format, Point(model, 1, 4096), dtype)
            except Exception as error:
                same = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            for context in args.contexts:
                rows += packed_rows(format, Point(model, 1, context), dtype, same, args)
                torch.cuda.empty_cache()
        if model == args.models[0]:
            at = Point(model, 1, min(32768, max(args.contexts)))
            for bits in (4, 2):
                for name, timing in others(at, dtype, bits, args.seconds).items():
                    rows.append(row_of(at, f"int{bits}", name, timing, None, reads.rate))
    flushed = list(flush_rows(args, formats, dtype))
    for row in rows:
        row.setdefault("ceiling_GB_s", reads.rate)
    path = report.result_folder(args.out) / f"{args.name or 'quantize'}.json"
    content = {"ceiling": reads.as_dict(), "dtype": args.dtype, "rows": rows, "flushes": flushed}
    report.write_json(path, {"what": "quantize and pack keys and values of one layer", **report.machine(), **content})
    print("\n" + render_table(HEAD, [quantize_cells(row, reads.rate) for row in rows], HEAD.index("us")))
    flushes = [[shown for key, shown in row.items() if key != "failed"] for row in flushed]
    print("\n" + render_table(FLUSH, flushes, FLUSH.index("GPU us")))
    print(f"us: median time for keys and values of one layer together; GB/s: bytes read and written per second\n{path}")
    mine = [row for row in rows if "same" in row] + flushed
    return int(any("failed" in row or row.get("same", True) is not True for row in mine))


def packed_rows(
    format: str, at: Point, dtype: torch.dtype, same: object, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Time the packing of a layer's keys and values by kvbench's kernel and by torch operations; yield a row for each.

    With ``--warps``, the kernel has one row for each number of warps. Torch has none beyond 32k tokens. `same` is what
    :func:`equal` found: True, False, or the error as text.
    """
    size = traffic(format, at)
    for count in args.warps or [None]:
        try:
            with warps(count):
                time: Time | str = replayed(both(format, at, dtype), args.seconds)
        except Exception as error:
            time = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        name = "kernel" if count is None else f"kernel, {count} warps"
        yield row_of(at, format, name, time, size, None) | {"same": same}
    if at.context <= 32768:
        with torchs_way():
            yield row_of(at, format, "torch's way", eager(both(format, at, dtype)[0], args.seconds), size, None)


def row_of(
    at: Point, format: str, what: str, measured: Time | str, size: int | None, rate: float | None
) -> dict[str, Any]:
    """Combine a time, or the reason why there is none, with what was timed into a row of the JSON file.

    `size` is the bytes read and written, `rate` the bandwidth of plain reads in GB/s, None if the caller adds it later.
    """
    row: dict[str, Any] = {**asdict(at), "format": format, "what": what}
    if isinstance(measured, str):
        return row | {"failed": measured}
    row.update(us=measured.us, p10=measured.p10, p90=measured.p90, rounds=measured.rounds, bytes=size)
    if rate is not None:
        row["ceiling_GB_s"] = rate
    return row


def quantize_cells(row: dict[str, Any], rate: float) -> list[object]:
    """Return one line of the table as cells; `rate` is the bandwidth of plain reads, GB/s."""
    start = [row["model"], short_count(row["context"]), row["format"], row["what"]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    speed = row["bytes"] / row["us"] / 1e3 if row["bytes"] else None
    share = 100 * speed / rate if speed else None
    same = {True: "yes", False: "NO", None: "-"}.get(row.get("same"), row.get("same"))
    return [*start, row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, share, same]


def flush_rows(args: argparse.Namespace, formats: tuple[str, ...], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Time each of :func:`timed_flushes` of the first model in each format at each length, and yield a row for each."""
    model = args.models[0]
    for format in formats:
        for name, side, count in timed_flushes(format):
            for context in args.contexts:
                at = Point(model, 1, context)
                row: dict[str, Any] = {"model": model, "context": context, "format": format, "flush": name}
                try:
                    figures = measure_flush(format, at, side, count, dtype, args.seconds)
                    row.update(zip(("gpu_us", "called_us", "torch_us"), figures, strict=True))
                except Exception as error:
                    row.update(gpu_us=None, called_us=None, torch_us=None)
                    row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                    print(row["failed"], flush=True)
                yield row
