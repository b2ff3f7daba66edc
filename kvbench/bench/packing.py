"""Packing of keys and values, timed: kvbench's kernels, torch operations, and the back ends of transformers' cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.bench.clock import Time, copies, eager, replayed
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

ALL = slice(None)


def quantizer(format: str, side: Side, channels: int) -> AffineQuantizer:
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


def empty(format: str, side: Side, at: Point, dtype: torch.dtype, capacity: int) -> PackedSegment:
    """Return an empty packed segment with room for `capacity` tokens.

    A NaN or Inf that is packed into it raises no error, so that packing does not wait for the device.
    """
    model = MODELS[at.model]
    segment = PackedSegment(
        at.batch, model.heads, model.channels, dtype, "cuda",
        quantizer=quantizer(format, side, model.channels), side=side, capacity=capacity,
    )  # fmt: skip
    watch = Watch(segment.device)
    segment.watch = (watch, watch.tag(uncached_message))
    return segment


def fresh(at: Point, dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Return random keys or values as a model yields them: ``[B, H, T, D]``, a view of ``[B, T, H, D]``.

    One channel has eight times the magnitude of the others.
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
    """Pack the tokens `index` (None: all) of ``x`` ``[B, H, T, D]`` into a segment from slot `first` on.

    What the segment holds there is overwritten.
    """
    segment.lengths = [first] * len(segment.lengths)
    if index is None:
        segment.append(ALL, x)
    else:
        segment.append_chosen(ALL, x, index)


def equal(format: str, at: Point, dtype: torch.dtype) -> bool:
    """Return True if kvbench's kernel packs keys and values into exactly the same bits as torch operations do.

    The comparison covers 4096 tokens in order, and 2048 tokens chosen by index.
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

    The result has the error as text for a back end that is not installed or fails. Measuring takes `seconds` for each.
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
    group = quantizer(format, "key", 128)
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
    x = fresh(at, dtype, count).contiguous()
    # always the same tokens into the same slots: only the slots matter, and a real decode step has them in cache too
    segment = empty(format, side, at, dtype, at.context + 128)
    call = partial(put, segment, at.context, x)
    on_gpu, called = replayed([call], seconds).us, eager(call, seconds).us
    with torchs_way():
        return on_gpu, called, eager(call, seconds).us
