"""``python -m kvbench.bench quantize``: times of quantizing and packing keys and values, in prefill and decoding."""

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
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.watch import Watch, words
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.engine.build import build as engine_quantizer
from kvbench.quantizers.engine.formats import FORMATS as ENGINES
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.kvarn import KvarnQuantizer
from kvbench.quantizers.turboquant import LevelQuantizer
from kvbench.util.table import table

DEFAULT = ("int4_g128", "int4_g32", "int2_g32", "int8", "atom4")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8")
ALL = slice(None)
HEAD = ("model", "tokens", "format", "what", "us", "+-%", "GB/s", "% read", "same as torch")
FLUSH = ("model", "tokens held", "format", "flush", "GPU us", "called us", "torch us")


def quantizer(format: str, side: Side, channels: int) -> AffineQuantizer:
    """Create the quantizer that encodes the keys or the values of a layer in a given format.

    Args:
        format: key of :data:`~kvbench.bench.shapes.FORMATS`. The format must store all tokens alike (``Layer.single``).
        side: ``key`` or ``value``.
        channels: channels per head.
    """
    if format in ENGINES:
        return engine_quantizer(ENGINES[format], side, channels, channels)
    form = resolved(getattr(FORMATS[format].tiers[0], side), channels)
    axis: Any = form.axis
    if form.kind == "hierarchical":
        return HierarchicalQuantizer(form.group, axis)
    if form.kind == "cross":
        return KvarnQuantizer(form.bits, TILE, axis)
    if form.kind == "levels_read":
        return LevelQuantizer(form.bits)
    return (AtomQuantizer if form.kind == "atom" else AffineQuantizer)(form.bits, form.group, axis)


def empty(format: str, side: Side, at: Point, dtype: torch.dtype, capacity: int) -> PackedSegment:
    """Return an empty packed segment with room for `capacity` tokens.

    A NaN or Inf that is packed into it raises no error, so that packing does not wait for the device.

    Args:
        format: name of the format, a key of :data:`~kvbench.bench.shapes.FORMATS`.
        side: ``key`` or ``value``.
        at: model and batch.
        dtype: dtype of the tokens to pack.
        capacity: number of tokens for which to allocate.
    """
    model = MODELS[at.model]
    segment = PackedSegment(
        at.batch, model.heads, model.channels, dtype, "cuda",
        quantizer=quantizer(format, side, model.channels), side=side, capacity=capacity,
    )  # fmt: skip
    watch = Watch(segment.device)
    segment.watch = (watch, watch.tag(words))
    return segment


def fresh(at: Point, dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Return random keys or values as a model yields them: ``[B, H, T, D]``, a view of ``[B, T, H, D]``.

    One channel has eight times the magnitude of the others.

    Args:
        at: model and batch.
        dtype: dtype of the tensor.
        count: T, number of tokens.
        seed: seed of the random numbers.
    """
    model, rng = MODELS[at.model], torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(at.batch, count, model.heads, model.channels, generator=rng, device="cuda").to(dtype)
    x[..., 5] *= 8
    return x.transpose(1, 2)


@contextmanager
def torchs_way() -> Iterator[None]:
    """Within a ``with`` block, make packed segments quantize with torch operations instead of kvbench's kernel."""
    known = packed.served
    packed.served = lambda segment, x: "bench: torch's way"
    try:
        yield
    finally:
        packed.served = known


@contextmanager
def warps(count: int | None) -> Iterator[None]:
    """Within a ``with`` block, launch the packing kernel with `count` warps per program; None for its default."""
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


def put(segment: PackedSegment, first: int, x: Tensor, index: Tensor | None = None) -> None:
    """Pack tokens into a segment from a given slot on, and overwrite what the segment holds there.

    Args:
        segment: segment to pack into.
        first: number of tokens that the segment is taken to hold, which is also the first slot to write.
        x: new keys or values, ``[B, H, T, D]``.
        index: tokens of `x` to pack, in this order; None for all.
    """
    segment.lengths = [first] * len(segment.lengths)
    if index is None:
        segment.append(ALL, x)
    else:
        segment.append_chosen(ALL, x, index)


def equal(format: str, at: Point, dtype: torch.dtype) -> bool:
    """Return True if kvbench's kernel packs keys and values into exactly the same bits as torch operations do.

    The comparison covers 4096 tokens in order, and 2048 tokens chosen by index.

    Args:
        format: name of the format, a key of :data:`~kvbench.bench.shapes.FORMATS`.
        at: model and batch.
        dtype: dtype of the tokens to pack.
    """
    x = fresh(at, dtype, 4096)
    order = torch.randperm(4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for side in ("key", "value"):
        for index in (None, order[:2048]):
            ours, torchs = (empty(format, side, at, dtype, 4096) for _ in range(2))
            put(ours, 0, x, index)
            with torchs_way():
                put(torchs, 0, x, index)
            for a, b in zip(ours.words + ours.params, torchs.words + torchs.params, strict=True):
                if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                    return False
    return True


def both(format: str, at: Point, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return equivalent functions for timing, each of which packs a layer's keys and values into buffers of its own.

    There are so many that all buffers together exceed the L2 cache, so each function reads its tokens from memory.

    Args:
        format: key of :data:`~kvbench.bench.shapes.FORMATS`.
        at: model, batch and tokens.
        dtype: dtype of the tokens to pack.
    """
    model = MODELS[at.model]
    size = 4 * at.batch * model.heads * at.context * model.channels
    calls: list[Callable[[], None]] = []
    for _ in range(copies(size)):
        keys, values = fresh(at, dtype, at.context), fresh(at, dtype, at.context, 1)
        segments = [empty(format, side, at, dtype, at.context) for side in ("key", "value")]  # type: ignore[arg-type]

        calls.append(partial(put_both, segments, keys, values))
    return calls


def put_both(segments: list[PackedSegment], keys: Tensor, values: Tensor) -> None:
    """Pack keys into the first and values into the second of two segments, beginning at slot 0."""
    put(segments[0], 0, keys)
    put(segments[1], 0, values)


def traffic(format: str, at: Point) -> int:
    """Return how many bytes packing must read and write for the keys and values of `at.context` tokens in a layer."""
    model, tier = MODELS[at.model], FORMATS[format].tiers[0]
    packed = sum(side_bytes(form, at.context, model.channels) for form in (tier.key, tier.value))
    return (4 * at.context * model.channels + packed) * model.heads * at.batch


def others(at: Point, dtype: torch.dtype, bits: int, seconds: float) -> dict[str, Time | str]:
    """Time how quanto and hqq, the back ends of transformers' QuantizedCache, quantize a layer's keys and values.

    Args:
        at: model, batch and tokens.
        dtype: dtype of keys and values.
        bits: bits per code.
        seconds: measuring time per back end.

    Returns:
        For each back end, by name, its time, or the error as text if it is not installed or fails.
    """
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
    """Return a function that quantizes a tensor with optimum-quanto as transformers' QuantizedCache does.

    Args:
        bits: bits per code: 2 or 4. 64 elements share a scale.
    """
    from optimum import quanto as q  # type: ignore[import-not-found,import-untyped,unused-ignore]

    kind, optimizer = {2: q.qint2, 4: q.qint4}[bits], q.MaxOptimizer()

    def run(x: Tensor) -> object:
        scale, zero = optimizer(x, kind, 0, 64)
        return q.quantize_weight(x, kind, 0, scale, zero, 64)

    return run


def hqq(bits: int) -> Callable[[Tensor], object]:
    """Return a function that quantizes a tensor with hqq as transformers' QuantizedCache does.

    Args:
        bits: bits per code. 64 elements share a scale.
    """
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return lambda x: Quantizer.quantize(x, axis=1, device=x.device, compute_dtype=x.dtype, nbits=bits, group_size=64)


def flushes(format: str) -> list[tuple[str, Side, int]]:
    """Return the flushes to time. A flush packs, in one go, the tokens that leave a method's full-precision window.

    The flushes are 128 keys; 64 keys (LogQuant, W = 64), if the format's groups have at most 64 tokens; and one value
    (KIVI).

    Args:
        format: key of :data:`~kvbench.bench.shapes.FORMATS`.

    Returns:
        For each flush, its name, ``key`` or ``value``, and the number of tokens.
    """
    group = quantizer(format, "key", 128)
    blocks: list[tuple[str, Side, int]] = [("128 keys", "key", 128)]
    if group.block_tokens <= 64:
        blocks.append(("64 keys", "key", 64))
    return [*blocks, ("1 value", "value", 1)]


def measure_flush(
    format: str, at: Point, side: Side, count: int, dtype: torch.dtype, seconds: float
) -> tuple[float, float, float]:
    """Measure, in three ways, how long it takes to pack `count` tokens into a segment that holds `at.context` tokens.

    Args:
        format: key of :data:`~kvbench.bench.shapes.FORMATS`.
        at: model, batch, and number of tokens that the segment already holds.
        side: ``key`` or ``value``.
        count: number of tokens to pack.
        dtype: dtype of the tokens to pack.
        seconds: measuring time per way.

    Returns:
        Microseconds: of kvbench's kernel in a replayed CUDA graph, of the same kernel called from Python, and of torch
        operations called from Python.
    """
    x = fresh(at, dtype, count).contiguous()
    # always the same tokens into the same slots: only the slots matter, and a real decode step has them in cache too
    segment = empty(format, side, at, dtype, at.context + 128)
    call = partial(put, segment, at.context, x)
    on_gpu, called = replayed([call], seconds).us, eager(call, seconds).us
    with torchs_way():
        return on_gpu, called, eager(call, seconds).us


def run(args: argparse.Namespace) -> int:
    """Time the packing of whole layers and of flushes (:func:`flushes`), write the JSON file and print two tables.

    Returns:
        The exit status: 1 if a measurement of kvbench's kernel failed or its result differs from torch's, else 0.
    """
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
    print("\n" + table(HEAD, [line(row, reads.rate) for row in rows], HEAD.index("us")))
    flushes = [[shown for key, shown in row.items() if key != "failed"] for row in flushed]
    print("\n" + table(FLUSH, flushes, FLUSH.index("GPU us")))
    print(f"us: median time for keys and values of one layer together; GB/s: bytes read and written per second\n{path}")
    mine = [row for row in rows if "same" in row] + flushed
    return int(any("failed" in row or row.get("same", True) is not True for row in mine))


def packed_rows(
    format: str, at: Point, dtype: torch.dtype, same: object, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Time the packing of a layer's keys and values by kvbench's kernel and by torch operations; yield a row for each.

    With ``--warps``, the kernel has one row for each number of warps. Torch has none beyond 32k tokens.

    Args:
        format: key of :data:`~kvbench.bench.shapes.FORMATS`.
        at: model, batch and tokens.
        dtype: dtype of the tokens to pack.
        same: whether the kernel packs into the same bits as torch, to be stored in its rows: True, False, or the error
            as text (:func:`equal`).
        args: options of the command line.
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
    """Combine a time with what was timed into a row of the JSON file.

    Args:
        at: model, batch and tokens.
        format: key of :data:`~kvbench.bench.shapes.FORMATS`.
        what: what was timed, for example ``kernel``.
        measured: the time, or the reason why there is none.
        size: bytes read and written; None if unknown.
        rate: bandwidth of plain reads, GB/s; None if the caller adds it later.
    """
    row: dict[str, Any] = {**asdict(at), "format": format, "what": what}
    if isinstance(measured, str):
        return row | {"failed": measured}
    row.update(us=measured.us, p10=measured.p10, p90=measured.p90, rounds=measured.rounds, bytes=size)
    if rate is not None:
        row["ceiling_GB_s"] = rate
    return row


def line(row: dict[str, Any], rate: float) -> list[object]:
    """Return one line of the table as cells.

    Args:
        row: one row of the JSON file.
        rate: bandwidth of plain reads, GB/s.
    """
    start = [row["model"], short(row["context"]), row["format"], row["what"]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    speed = row["bytes"] / row["us"] / 1e3 if row["bytes"] else None
    share = 100 * speed / rate if speed else None
    same = {True: "yes", False: "NO", None: "-"}.get(row.get("same"), row.get("same"))
    return [*start, row["us"], 50 * (row["p90"] - row["p10"]) / row["us"], speed, share, same]


def flush_rows(args: argparse.Namespace, formats: tuple[str, ...], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Time each flush (:func:`flushes`) in each format and at each context length, and yield a row for each.

    Args:
        args: options of the command line. Only the first model is measured.
        formats: keys of :data:`~kvbench.bench.shapes.FORMATS`.
        dtype: dtype of the tokens to pack.
    """
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
