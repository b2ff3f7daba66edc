"""``python -m kvbench.bench quantize``: fresh keys and values to packed tiles, and the flush while decoding."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.bench import ceiling, report
from kvbench.bench.clock import Time, copies, eager, replayed
from kvbench.bench.shapes import FORMATS, MODELS, Point, resolved, short, side_bytes
from kvbench.cache.kernels.forms import Form
from kvbench.cache.kernels.pack_together import Packed
from kvbench.cache.segments import packed
from kvbench.cache.segments.base import Side
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.watch import Watch, words
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.util.table import table

DEFAULT = ("int4_g128", "int4_g32", "int2_g32", "int8", "atom4")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8")
ALL = slice(None)
HEAD = ("model", "tokens", "format", "what", "us", "+-%", "GB/s", "% read", "same as torch")
FLUSH = ("model", "tokens held", "format", "flush", "GPU us", "called us", "torch us")


def quantizer(format: str, side: Side, channels: int) -> AffineQuantizer:
    """The quantizer of one side of a single format."""
    form = resolved(getattr(FORMATS[format].tiers[0], side), channels)
    axis: Any = form.axis
    if form.kind == "hierarchical":
        return HierarchicalQuantizer(form.group, axis)
    return (AtomQuantizer if form.kind == "atom" else AffineQuantizer)(form.bits, form.group, axis)


def empty(format: str, side: Side, at: Point, dtype: torch.dtype, capacity: int) -> PackedSegment:
    """A segment with room for `capacity` tokens that waits for nobody."""
    model = MODELS[at.model]
    segment = PackedSegment(
        at.batch, model.heads, model.channels, dtype, "cuda",
        quantizer=quantizer(format, side, model.channels), side=side, capacity=capacity,
    )  # fmt: skip
    watch = Watch(segment.device)
    segment.watch = (watch, watch.tag(words))
    return segment


def fresh(at: Point, dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Keys or values as a model makes them: ``[B, H, T, D]`` seen in ``[B, T, H, D]``; some channels stand out."""
    model, rng = MODELS[at.model], torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(at.batch, count, model.heads, model.channels, generator=rng, device="cuda").to(dtype)
    x[..., 5] *= 8
    return x.transpose(1, 2)


@contextmanager
def torchs_way() -> Iterator[None]:
    """Segments encode with torch while this lasts."""
    known = packed.served
    packed.served = lambda segment, x: "bench: torch's way"
    try:
        yield
    finally:
        packed.served = known


@contextmanager
def warps(count: int | None) -> Iterator[None]:
    """Segments are packed by programs of `count` warps while this lasts."""
    known = packed.served
    if count is not None:

        def served(segment: Packed, x: Tensor) -> Form | str:
            form = known(segment, x)
            return replace(form, warps=count) if isinstance(form, Form) else form

        packed.served = served
    try:
        yield
    finally:
        packed.served = known


def put(segment: PackedSegment, held: int, x: Tensor, index: Tensor | None = None) -> None:
    """Pack `x` behind `held` tokens."""
    segment.lengths = [held] * len(segment.lengths)
    if index is None:
        segment.append(ALL, x)
    else:
        segment.append_chosen(ALL, x, index)


def equal(format: str, at: Point, dtype: torch.dtype) -> bool:
    """Return True if both sides are packed bit for bit as by torch (4096 tokens, gathered ones too)."""
    x = fresh(at, dtype, 4096)
    order = torch.randperm(4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for side in ("key", "value"):
        for index in (None, order[:2048]):
            mine, theirs = (empty(format, side, at, dtype, 4096) for _ in range(2))
            put(mine, 0, x, index)
            with torchs_way():
                put(theirs, 0, x, index)
            for a, b in zip(mine.words + mine.params, theirs.words + theirs.params, strict=True):
                if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                    return False
    return True


def both(format: str, at: Point, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return calls that pack a layer's keys and values, in as many buffers as exceed the cache."""
    model = MODELS[at.model]
    size = 4 * at.batch * model.heads * at.context * model.channels
    calls: list[Callable[[], None]] = []
    for _ in range(copies(size)):
        keys, values = fresh(at, dtype, at.context), fresh(at, dtype, at.context, 1)
        segments = [empty(format, side, at, dtype, at.context) for side in ("key", "value")]  # type: ignore[arg-type]

        calls.append(partial(put_both, segments, keys, values))
    return calls


def put_both(made: list[PackedSegment], keys: Tensor, values: Tensor) -> None:
    """Pack a layer's keys and values from the front."""
    put(made[0], 0, keys)
    put(made[1], 0, values)


def traffic(format: str, at: Point) -> int:
    """Return the bytes that are read and written."""
    model, tier = MODELS[at.model], FORMATS[format].tiers[0]
    packed = sum(side_bytes(form, at.context, model.channels) for form in (tier.key, tier.value))
    return (4 * at.context * model.channels + packed) * model.heads * at.batch


def others(at: Point, dtype: torch.dtype, bits: int, seconds: float) -> dict[str, Time | str]:
    """Keys and values of a layer by the quantizers of transformers' QuantizedCache, where they are installed."""
    times: dict[str, Time | str] = {}
    x, y = fresh(at, dtype, at.context).contiguous(), fresh(at, dtype, at.context, 1).contiguous()
    for name, method in (("quanto", quanto), ("hqq", hqq)):
        try:
            run = method(bits)
            times[f"{name} {bits}-bit"] = eager(lambda run=run: (run(x), run(y)), seconds)  # type: ignore[misc]
        except Exception as error:
            times[f"{name} {bits}-bit"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return times


def quanto(bits: int) -> Callable[[Tensor], object]:
    """optimum-quanto, groups of 64, as transformers calls it."""
    from optimum import quanto as q  # type: ignore[import-not-found,import-untyped,unused-ignore]

    kind, optimizer = {2: q.qint2, 4: q.qint4}[bits], q.MaxOptimizer()

    def run(x: Tensor) -> object:
        scale, zero = optimizer(x, kind, 0, 64)
        return q.quantize_weight(x, kind, 0, scale, zero, 64)

    return run


def hqq(bits: int) -> Callable[[Tensor], object]:
    """hqq, groups of 64, as transformers calls it."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return lambda x: Quantizer.quantize(x, axis=1, device=x.device, compute_dtype=x.dtype, nbits=bits, group_size=64)


def flushes(format: str) -> list[tuple[str, Side, int]]:
    """Return the blocks that leave a window at once: a key group, half a tile (LogQuant, W = 64), one value (KIVI)."""
    group = quantizer(format, "key", 128)
    blocks: list[tuple[str, Side, int]] = [("128 keys", "key", 128)]
    if group.block_tokens <= 64:
        blocks.append(("64 keys", "key", 64))
    return [*blocks, ("1 value", "value", 1)]


def measure_flush(
    format: str, at: Point, side: Side, count: int, dtype: torch.dtype, seconds: float
) -> tuple[float, float, float]:
    """Return microseconds of a flush behind `at.context` tokens: on the GPU, as called from Python, and with torch."""
    x = fresh(at, dtype, count).contiguous()
    # the same tokens again and again: the place is what matters, and it is cold in no real decode step either
    segment = empty(format, side, at, dtype, at.context + 128)
    call = partial(put, segment, at.context, x)
    on_gpu, called = replayed([call], seconds).us, eager(call, seconds).us
    with torchs_way():
        return on_gpu, called, eager(call, seconds).us


def run(args: argparse.Namespace) -> int:
    """Measure all rows; return 1 if one failed or differs from torch."""
    dtype = getattr(torch, args.dtype)
    if args.quick:
        args.seconds, args.contexts = min(args.seconds, 0.1), [4096, 32768]
    formats = args.formats or (QUICK_FORMATS if args.quick else DEFAULT)
    reads = ceiling.measure(0.1 if args.quick else 0.3)
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
    path = report.folder(args.out) / f"{args.name or 'quantize'}.json"
    content = {"ceiling": reads.as_dict(), "dtype": args.dtype, "rows": rows, "flushes": flushed}
    report.write(path, {"what": "quantize and pack keys and values of one layer", **report.machine(), **content})
    print("\n" + table(HEAD, [line(row, reads.rate) for row in rows]))
    print("\n" + table(FLUSH, [[shown for key, shown in row.items() if key != "failed"] for row in flushed]))
    print(f"us: keys and values of one layer together, median; GB/s: read and written\n{path}")
    mine = [row for row in rows if "same" in row] + flushed
    return int(any("failed" in row or row.get("same", True) is not True for row in mine))


def packed_rows(
    format: str, at: Point, dtype: torch.dtype, same: object, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The kernel (with each number of warps asked for), and torch's way."""
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
    at: Point, format: str, what: str, found: Time | str, size: int | None, rate: float | None
) -> dict[str, Any]:
    """Return a row for the JSON file."""
    row: dict[str, Any] = {**asdict(at), "format": format, "what": what}
    if isinstance(found, str):
        return row | {"failed": found}
    row.update(us=found.us, p10=found.p10, p90=found.p90, rounds=found.rounds, bytes=size)
    if rate is not None:
        row["ceiling_GB_s"] = rate
    return row


def line(row: dict[str, Any], rate: float) -> list[object]:
    """Return a row of the table."""
    start = [row["model"], short(row["context"]), row["format"], row["what"]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    speed = row["bytes"] / row["us"] / 1e3 if row["bytes"] else None
    share = 100 * speed / rate if speed else None
    same = {True: "yes", False: "NO", None: "-"}.get(row.get("same"), row.get("same"))
    return [*start, row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, share, same]


def flush_rows(args: argparse.Namespace, formats: tuple[str, ...], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Return the flushes at every context of the first model."""
    model = args.models[0]
    for format in formats:
        for name, side, count in flushes(format):
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
