"""``python -m kvbench.bench products``: linear layers of a decode step, with 16-bit and with 4-bit weights.

kvbench's kernels are timed beside torch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.bench.choices import add_timing_options, positive_number, shape_of
from kvbench.bench.clock import Time, copies, replayed, shown_ceiling, timed_cells
from kvbench.bench.report import Recording, failure_reason
from kvbench.linear import int4, layout, matvec, product_kernels
from kvbench.profiling.roofline import Shape
from kvbench.util.table import render_table

Row = dict[str, Any]
HEAD = ("model", "product", "channels", "columns", "rows", "bits", "by", "us", "+-%", "GB/s", "% read", "error")
STEPS = ("model", "rows", "bits", "by", "ms")
#: input channels of a 4-bit matrix that share a scale
GROUP = 128
#: largest acceptable error, root mean square relative to the output: a few roundings of bf16
TOLERANCE = 2e-2
#: the same for kvbench's kernels: little more than the rounding of the output, 1.7e-3
OURS = 3e-3
#: tiles of 16 input channels that torch's 4-bit product reads at a time
TORCH_TILES = 8


def add_products_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``products``."""
    add = parser.add_argument
    about = "presets, OWNER/NAME of the hub, or folders"
    add("--models", nargs="+", default=["llama2-7b", "llama3.1-8b"], help=about)
    about = "rows of the input: sequences times new tokens per step (default: 1 2 5 8 16)"
    add("--rows", nargs="+", type=positive_number, default=[1, 2, 5, 8, 16], metavar="R", help=about)
    add("--bits", nargs="+", type=int, choices=[4, 16], default=[4, 16], help="bits of a weight (default: 4 16)")
    about = "also measure kernels tuned by torch.compile, which takes some seconds each"
    add("--compiled", action="store_true", help=about)
    add_timing_options(parser, "bfloat16", "data type of the input")


@dataclass(frozen=True)
class Way:
    """An implementation of a matrix product, and the matrices by which it multiplies.

    Args:
        call: function of an input ``[rows, columns]`` and one of `matrices`.
        matrices: matrices in the form that the implementation reads, one per call in the CUDA graph that is timed.
        size: bytes of a matrix, with its scales and zeros.
        tolerance: largest acceptable error, root mean square relative to the output.
    """

    by: str
    bits: int
    call: Callable[[Tensor, Any], Tensor]
    matrices: list[Any] = field(repr=False)
    size: int
    tolerance: float = TOLERANCE


def ways_of_16_bits(weights: list[Tensor], compiled: bool = False) -> Iterator[Way]:
    """Yield the implementations for 16-bit weights ``[channels, columns]``; with `compiled`, also torch.compile's."""
    size = weights[0].numel() * weights[0].element_size()
    yield Way("kvbench", 16, matvec.launch_matvec, weights, size, OURS)
    yield Way("torch (library)", 16, nn.functional.linear, weights, size)
    if compiled:
        tuned = torch.compile(
            lambda x, weight: nn.functional.linear(x, weight),
            dynamic=False,
            options={"coordinate_descent_tuning": True},
        )
        yield Way("torch.compile, tuned", 16, tuned, weights, size)


def ways_of_4_bits(weights: list[int4.Int4Weight]) -> Iterator[Way]:
    """Yield the implementations for 4-bit weights; torch's has the same weights in its form (:func:`torch_weight`)."""
    yield Way("kvbench", 4, kernel_product, weights, weights[0].nbytes, OURS)
    group = weights[0].group
    packed = [torch_weight(weight) for weight in weights]
    size = sum(part.numel() * part.element_size() for part in packed[0])

    def call(x: Tensor, matrix: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, matrix[0], group, matrix[1])

    yield Way("torch (int4)", 4, call, packed, size)


def kernel_product(x: Tensor, weight: int4.Int4Weight) -> Tensor:
    """Return the product by kvbench's kernel.

    Raises:
        RuntimeError: the kernel cannot compute it.
    """
    half = weight.dtype == torch.float16
    able = product_kernels.serves(x, weight.columns)
    out = product_kernels.int4(x, weight.codes, weight.groups, weight.rows, weight.group, half, None) if able else None
    if out is None:
        raise RuntimeError(f"kvbench's kernel does not serve {len(x)} rows of {x.dtype} on {x.device}")
    return out


def torch_weight(weight: int4.Int4Weight) -> tuple[Tensor, Tensor]:
    """Return a 4-bit matrix as torch's product reads it: codes, and scales and zeros in bf16.

    A zero of torch's is the weight that code 8 stands for: ``(code - zero) * scale = (code - 8) * scale + (8 - zero) *
    scale``.
    """
    codes, scales, zeros = int4.unpacked(weight)
    nibbles = codes[:, ::2] << 4 | codes[:, 1::2]
    offsets = (8 - zeros.float()) * scales.float()
    params = torch.stack([scales.bfloat16(), offsets.bfloat16()], -1).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(nibbles, TORCH_TILES), params


def random_int4(channels: int, columns: int, group: int, seed: int, device: str = "cuda") -> int4.Int4Weight:
    """Return a random 4-bit matrix with bf16 scales; codes, scales and zeros are uniformly distributed."""
    rng = torch.Generator(device).manual_seed(seed)
    tiles = -(-channels // layout.ROWS)
    shape = tiles, columns // layout.COLUMNS, 32, 4
    codes = torch.randint(-(1 << 31), 1 << 31, shape, generator=rng, device=device, dtype=torch.int64).to(torch.int32)
    padded = tiles * layout.ROWS, columns // group
    scales = torch.rand(padded, generator=rng, device=device) * 0.004 + 0.001
    zeros = torch.randint(0, 17, padded, generator=rng, device=device)
    groups = layout.group_words(scales.bfloat16(), zeros)
    return int4.Int4Weight(codes, groups, channels, columns, group, torch.bfloat16)


def random_matrix(channels: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 0.02) -> Tensor:
    """Return a random matrix ``[channels, columns]`` with standard deviation `scale`, on the GPU."""
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(channels, columns, generator=rng, device="cuda") * scale).to(dtype)


def products_of(shape: Shape) -> dict[str, tuple[int, int]]:
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
def time_products(args: argparse.Namespace) -> int:
    """Time the products of every model, write the JSON file and print the table; return 1 if one failed, else 0.

    Raises:
        ConfigError: a model is unknown.
    """
    models = args.models[:1] if args.quick else args.models
    shapes = {Path(model).stem: shape_of(model) for model in models}
    file = Recording(args, "products", "products of a few rows with a weight matrix", dtype=args.dtype)
    rows, reads = file.rows, shown_ceiling(args)
    file.about["ceiling"] = reads.as_dict()
    for model, shape in shapes.items():
        for what, (channels, columns) in products_of(shape).items():
            row = {"model": model, "product": what, "channels": channels, "columns": columns}
            rows += [row | figures for figures in compared_ways(channels, columns, args)]
            file.write()
            torch.cuda.empty_cache()
    steps = [step for model, shape in shapes.items() for step in whole_steps(model, shape, rows)]
    file.about["steps"] = steps
    file.write()
    print("\n" + render_table(HEAD, [product_cells(row, reads.rate) for row in rows], HEAD.index("us")))
    print("\n" + render_table((*STEPS[:4], "ms of a step"), [[step[key] for key in STEPS] for step in steps], 4))
    print(
        "us: median time of a captured product, each with a different matrix; error: root mean square, relative to the "
        "output; ms of a step: all products of all layers and the head"
    )
    file.end()
    return int(any("failed" in row for row in rows))


def compared_ways(channels: int, columns: int, args: argparse.Namespace) -> list[Row]:
    """Measure every implementation of one product; return a row of figures for each of them and each number of rows.

    If the matrices do not fit into memory, a single row says so. `channels` are those of the output, `columns` those of
    the input.
    """
    rows = []
    dtype = getattr(torch, args.dtype)
    torch._dynamo.reset()  # torch.compile stops recompiling a function after a few shapes
    for bits in args.bits:
        try:
            ways, exact = prepared_ways(bits, channels, columns, dtype, args.compiled)
            for way in ways:
                for count in args.rows:
                    x = random_matrix(count, columns, dtype, 99, 1.0)
                    row = {"rows": count, "bits": bits, "by": way.by, **timed_product(way, x, exact, args.seconds)}
                    rows.append(row)
                    label = f"{channels} x {columns}, {bits} bits, {count} rows, {way.by}"
                    print(f"{label}: {row.get('us') or row['failed']}", flush=True)
        except torch.OutOfMemoryError as error:
            problem = f"the matrices do not fit into memory: {' '.join(str(error).split())[:120]}"
            rows.append({"rows": None, "bits": bits, "by": "any", "failed": problem})
    return rows


def prepared_ways(
    bits: int, channels: int, columns: int, dtype: torch.dtype, compiled: bool
) -> tuple[Iterator[Way], Tensor]:
    """Return the implementations for weights of `bits` bits, and the first of their matrices in fp32."""
    number = max(copies(channels * columns * bits // 8), 8 if bits == 16 else 2)
    if bits == 16:
        weights = [random_matrix(channels, columns, dtype, seed) for seed in range(number)]
        return ways_of_16_bits(weights, compiled), weights[0].float()
    packed = [random_int4(channels, columns, GROUP, seed) for seed in range(number)]
    return ways_of_4_bits(packed), int4.dequantized(packed[0], torch.float32)


def timed_product(way: Way, x: Tensor, exact: Tensor, seconds: float) -> Row:
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
        return {"failed": failure_reason(problem)}
    if not error <= way.tolerance:  # NaN too
        return {"failed": f"differs by {error:.3g} of the output, {time.us:.3g} us"}
    times = {"us": time.us, "p10": time.p10, "p90": time.p90, "rounds_timed": time.rounds}
    return {**times, "bytes": way.size, "error": error}


def whole_steps(model: str, shape: Shape, rows: Iterable[Row]) -> list[Row]:
    """Return for each implementation and number of rows the time of all products of a step, in milliseconds.

    An implementation that lacks one of the products (:func:`compared_ways`) has no entry.
    """
    times: dict[tuple[int, int, str], dict[str, float]] = {}
    for row in rows:
        if row["model"] == model and "us" in row:
            times.setdefault((row["rows"], row["bits"], row["by"]), {})[row["product"]] = row["us"]
    number = {what: 1 if what == "head" else shape.layers for what in products_of(shape)}
    return [
        dict(zip(STEPS, (model, *way, sum(number[what] * us for what, us in by_product.items()) / 1e3), strict=True))
        for way, by_product in sorted(times.items())
        if by_product.keys() == number.keys()
    ]


def product_cells(row: Row, rate: float) -> list[object]:
    """Return one line of the table as cells; `rate` is the bandwidth of plain reads, GB/s."""
    start = [row[key] for key in HEAD[:7]]
    if "us" not in row:
        return [*start, None, None, None, None, row["failed"]]
    return [*start, *timed_cells(row, rate), row["error"]]
