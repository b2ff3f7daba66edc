"""``python -m kvbench.bench quantize``: times of quantizing and packing keys and values, in prefill and decoding.

kvbench's kernels are timed beside torch operations and the back ends of transformers' QuantizedCache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.bench.choices import add_timing_options, short_count, tokens
from kvbench.bench.clock import Time, copies, eager, replayed, shown_ceiling, timed_cells
from kvbench.bench.report import Recording, failure_reason
from kvbench.bench.shapes import FORMATS, MODELS, Point, resolved, side_bytes
from kvbench.cache.kernels.jobs import Form
from kvbench.cache.kernels.pack_together import Packed
from kvbench.cache.segments import packed
from kvbench.cache.segments.base import Side
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.watch import Watch, uncached_message
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.engine.build import build as engine_quantizer
from kvbench.quantizers.engine.formats import FORMATS as ENGINES
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.kvarn import KvarnQuantizer
from kvbench.quantizers.turboquant import LevelQuantizer
from kvbench.util.table import render_table

Row = dict[str, Any]
ALL = slice(None)
DEFAULT = ("int4_g128", "int4_g32", "int2_g32", "int8", "atom4")
QUICK_FORMATS = ("int4_g128", "int4_g32", "int8")
HEAD = ("model", "tokens", "format", "what", "us", "+-%", "GB/s", "% read", "same as torch")
FLUSH = ("model", "tokens held", "format", "flush", "GPU us", "called us", "torch us")


def add_quantize_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``quantize``."""
    add, single = parser.add_argument, [name for name in FORMATS if FORMATS[name].single]
    add("--models", nargs="+", choices=MODELS, default=["7b", "8b"])
    add("--formats", nargs="+", choices=single, help="formats to measure (default: a selection)")
    add("--contexts", nargs="+", type=tokens, default=[4096, 32768, 131072], metavar="N")
    add("--warps", nargs="+", type=int, help="numbers of warps to try instead of the built-in choice")
    add_timing_options(parser, "float16", "data type of new keys and values")


def format_quantizer(format: str, side: Side, channels: int) -> AffineQuantizer:
    """Create the quantizer of the keys or the values of a layer in a format (:data:`FORMATS`).

    The format must store all tokens alike (``Layer.single``).
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


def empty_segment(format: str, side: Side, at: Point, dtype: torch.dtype, capacity: int) -> PackedSegment:
    """Return an empty packed segment with room for `capacity` tokens.

    A NaN or Inf that is packed into it raises no error, so that packing does not wait for the device.
    """
    model = MODELS[at.model]
    segment = PackedSegment(
        at.batch, model.heads, model.channels, dtype, "cuda",
        quantizer=format_quantizer(format, side, model.channels), side=side, capacity=capacity,
    )  # fmt: skip
    watch = Watch(segment.device)
    segment.watch = (watch, watch.tag(uncached_message))
    return segment


def fresh_tokens(at: Point, dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Return random keys or values as a model yields them: ``[B, H, T, D]``, a view of ``[B, T, H, D]``.

    One channel has eight times the magnitude of the others.
    """
    model, rng = MODELS[at.model], torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(at.batch, count, model.heads, model.channels, generator=rng, device="cuda").to(dtype)
    x[..., 5] *= 8
    return x.transpose(1, 2)


@contextmanager
def served_by(choice: Callable[[Packed, Tensor], Form | str]) -> Iterator[None]:
    """Within a ``with`` block, let `choice` say how packed segments quantize."""
    known, packed.served = packed.served, choice  # type: ignore[assignment]
    try:
        yield
    finally:
        packed.served = known


@contextmanager
def torchs_way() -> Iterator[None]:
    """Within a ``with`` block, make packed segments quantize with torch operations instead of kvbench's kernel."""
    with served_by(lambda segment, x: "bench: torch's way"):
        yield


@contextmanager
def with_warps(count: int | None) -> Iterator[None]:
    """Within a ``with`` block, launch the packing kernel with `count` warps per program; None for its default."""
    known = packed.served

    def served(segment: Packed, x: Tensor) -> Form | str:
        form = known(segment, x)
        return replace(form, warps=count) if isinstance(form, Form) else form  # type: ignore[arg-type]

    with served_by(known if count is None else served):
        yield


def pack_into_segment(segment: PackedSegment, first: int, x: Tensor, index: Tensor | None = None) -> None:
    """Pack the tokens `index` (None: all) of ``x`` ``[B, H, T, D]`` into a segment from slot `first` on.

    What the segment holds there is overwritten.
    """
    segment.lengths = [first] * len(segment.lengths)
    if index is None:
        segment.append(ALL, x)
    else:
        segment.append_chosen(ALL, x, index)


def packs_equal(format: str, at: Point, dtype: torch.dtype) -> bool:
    """Return True if kvbench's kernel packs keys and values into exactly the same bits as torch operations do.

    The comparison covers 4096 tokens in order, and 2048 tokens chosen by index.
    """
    x = fresh_tokens(at, dtype, 4096)
    order = torch.randperm(4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for side in ("key", "value"):
        for index in (None, order[:2048]):
            ours, torchs = (empty_segment(format, side, at, dtype, 4096) for _ in range(2))
            pack_into_segment(ours, 0, x, index)
            with torchs_way():
                pack_into_segment(torchs, 0, x, index)
            for a, b in zip(ours.words + ours.params, torchs.words + torchs.params, strict=True):
                if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                    return False
    return True


def layer_packings(format: str, at: Point, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return equivalent functions for timing, each of which packs a layer's keys and values into buffers of its own.

    There are so many that all buffers together exceed the L2 cache, so each function reads its tokens from memory.
    """
    model = MODELS[at.model]
    size = 4 * at.batch * model.heads * at.context * model.channels
    calls: list[Callable[[], None]] = []
    for _ in range(copies(size)):
        keys, values = fresh_tokens(at, dtype, at.context), fresh_tokens(at, dtype, at.context, 1)
        segments = [empty_segment(format, side, at, dtype, at.context) for side in ("key", "value")]  # type: ignore[arg-type]

        calls.append(partial(pack_both, segments, keys, values))
    return calls


def pack_both(segments: list[PackedSegment], keys: Tensor, values: Tensor) -> None:
    """Pack keys into the first and values into the second of two segments, beginning at slot 0."""
    pack_into_segment(segments[0], 0, keys)
    pack_into_segment(segments[1], 0, values)


def packing_bytes(format: str, at: Point) -> int:
    """Return how many bytes packing must read and write for the keys and values of `at.context` tokens in a layer."""
    model, tier = MODELS[at.model], FORMATS[format].tiers[0]
    packed = sum(side_bytes(form, at.context, model.channels) for form in (tier.key, tier.value))
    return (4 * at.context * model.channels + packed) * model.heads * at.batch


def time_others(at: Point, dtype: torch.dtype, bits: int, seconds: float) -> dict[str, Time | str]:
    """Time how quanto and hqq, the back ends of transformers' QuantizedCache, quantize a layer's keys and values.

    The result has the error as text for a back end that is not installed or fails. Measuring takes `seconds` for each.
    """
    times: dict[str, Time | str] = {}
    x, y = fresh_tokens(at, dtype, at.context).contiguous(), fresh_tokens(at, dtype, at.context, 1).contiguous()
    for name, method in (("quanto", quanto), ("hqq", hqq)):
        try:
            run = method(bits)
            times[f"{name} {bits}-bit"] = eager(lambda run=run: (run(x), run(y)), seconds)  # type: ignore[misc]
        except Exception as error:
            times[f"{name} {bits}-bit"] = failure_reason(error)
    return times


def quanto(bits: int) -> Callable[[Tensor], object]:
    """Return a function that quantizes in groups of 64 with optimum-quanto, as transformers' QuantizedCache does."""
    from optimum import quanto as q  # type: ignore[import-not-found,import-untyped,unused-ignore]

    kind, optimizer = {2: q.qint2, 4: q.qint4}[bits], q.MaxOptimizer()

    def run(x: Tensor) -> object:
        scale, zero = optimizer(x, kind, 0, 64)
        return q.quantize_weight(x, kind, 0, scale, zero, 64)

    return run


def hqq(bits: int) -> Callable[[Tensor], object]:
    """Return a function that quantizes in groups of 64 with hqq, as transformers' QuantizedCache does."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return lambda x: Quantizer.quantize(x, axis=1, device=x.device, compute_dtype=x.dtype, nbits=bits, group_size=64)


def timed_flushes(format: str) -> list[tuple[str, Side, int]]:
    """Return the flushes to time. A flush packs, in one go, the tokens that leave a method's full-precision window.

    They are 128 keys; 64 keys (LogQuant, W = 64), if the format's groups have at most 64 tokens; and one value (KIVI).
    Each has a name, ``key`` or ``value``, and the number of tokens.
    """
    group = format_quantizer(format, "key", 128)
    blocks: list[tuple[str, Side, int]] = [("128 keys", "key", 128)]
    if group.block_tokens <= 64:
        blocks.append(("64 keys", "key", 64))
    return [*blocks, ("1 value", "value", 1)]


def measure_flush(
    format: str, at: Point, side: Side, count: int, dtype: torch.dtype, seconds: float
) -> tuple[float, float, float]:
    """Measure, in three ways, how long it takes to pack `count` tokens into a segment that holds `at.context` tokens.

    Measuring takes `seconds` per way.

    Returns:
        Microseconds: of kvbench's kernel in a replayed CUDA graph, of the same kernel called from Python, and of torch
        operations called from Python.
    """
    x = fresh_tokens(at, dtype, count).contiguous()
    # always the same tokens into the same slots: only the slots matter, and a real decode step has them in cache too
    segment = empty_segment(format, side, at, dtype, at.context + 128)
    call = partial(pack_into_segment, segment, at.context, x)
    on_gpu, called = replayed([call], seconds).us, eager(call, seconds).us
    with torchs_way():
        return on_gpu, called, eager(call, seconds).us


def time_packing(args: argparse.Namespace) -> int:
    """Time the packing of whole layers and of flushes, write the JSON file and print two tables.

    The exit status is 1 if a measurement of kvbench's kernel failed or its result differs from torch's, else 0.
    """
    dtype = getattr(torch, args.dtype)
    if args.quick:
        args.seconds, args.contexts = min(args.seconds, 0.1), [4096, 32768]
    formats = args.formats or (QUICK_FORMATS if args.quick else DEFAULT)
    file = Recording(args, "quantize", "quantize and pack keys and values of one layer")
    rows, reads = file.rows, shown_ceiling(args)
    for model in args.models:
        for format in formats:
            try:
                same: object = packs_equal(format, Point(model, 1, 4096), dtype)
            except Exception as error:
                same = failure_reason(error)
            for context in args.contexts:
                rows += packing_rows(format, Point(model, 1, context), dtype, same, args)
                torch.cuda.empty_cache()
        if model == args.models[0]:
            at = Point(model, 1, min(32768, max(args.contexts)))
            for bits in (4, 2):
                for name, timing in time_others(at, dtype, bits, args.seconds).items():
                    rows.append(packing_row(at, f"int{bits}", name, timing, None))
    for row in rows:
        row["ceiling_GB_s"] = reads.rate
    flushed = list(flush_rows(args, formats, dtype))
    file.about |= {"ceiling": reads.as_dict(), "dtype": args.dtype, "flushes": flushed}
    file.write()
    print("\n" + render_table(HEAD, [packing_cells(row, reads.rate) for row in rows], HEAD.index("us")))
    lines = [[shown for key, shown in row.items() if key != "failed"] for row in flushed]
    print("\n" + render_table(FLUSH, lines, FLUSH.index("GPU us")))
    print("us: median time for keys and values of one layer together; GB/s: bytes read and written per second")
    file.end()
    mine = [row for row in rows if "same" in row] + flushed
    return int(any("failed" in row or row.get("same", True) is not True for row in mine))


def packing_rows(format: str, at: Point, dtype: torch.dtype, same: object, args: argparse.Namespace) -> Iterator[Row]:
    """Time the packing of a layer's keys and values by kvbench's kernel and by torch operations; yield a row for each.

    With ``--warps``, the kernel has one row for each number of warps. Torch has no row beyond 32k tokens. `same` is the
    result of :func:`packs_equal`: True, False, or the error as text.
    """
    size = packing_bytes(format, at)
    for count in args.warps or [None]:
        try:
            with with_warps(count):
                time: Time | str = replayed(layer_packings(format, at, dtype), args.seconds)
        except Exception as error:
            time = failure_reason(error)
        name = "kernel" if count is None else f"kernel, {count} warps"
        yield packing_row(at, format, name, time, size) | {"same": same}
    if at.context <= 32768:
        with torchs_way():
            timing = eager(layer_packings(format, at, dtype)[0], args.seconds)
        yield packing_row(at, format, "torch's way", timing, size)


def packing_row(at: Point, format: str, what: str, measured: Time | str, size: int | None) -> Row:
    """Return a row of the JSON file: the case, and its time or the reason why there is none.

    `what` names what was timed; `size` is the bytes read and written, None if unknown.
    """
    figures = {"failed": measured} if isinstance(measured, str) else {**asdict(measured), "bytes": size}
    return {**asdict(at), "format": format, "what": what, **figures}


def packing_cells(row: Row, rate: float) -> list[object]:
    """Return one line of the table as cells; `rate` is the bandwidth of plain reads, GB/s."""
    start = [row["model"], short_count(row["context"]), row["format"], row["what"]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    same = {True: "yes", False: "NO", None: "-"}.get(row.get("same"), row.get("same"))
    return [*start, *timed_cells(row, rate), same]


def flush_rows(args: argparse.Namespace, formats: tuple[str, ...], dtype: torch.dtype) -> Iterator[Row]:
    """Time each flush (:func:`timed_flushes`) of the first model, for every format and length, and yield its row."""
    model = args.models[0]
    for format in formats:
        for name, side, count in timed_flushes(format):
            for context in args.contexts:
                at = Point(model, 1, context)
                row: Row = {"model": model, "context": context, "format": format, "flush": name}
                try:
                    figures = measure_flush(format, at, side, count, dtype, args.seconds)
                    row.update(zip(("gpu_us", "called_us", "torch_us"), figures, strict=True))
                except Exception as error:
                    row.update(gpu_us=None, called_us=None, torch_us=None)
                    row["failed"] = failure_reason(error)
                    print(row["failed"], flush=True)
                yield row
