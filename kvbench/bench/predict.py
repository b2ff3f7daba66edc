"""``python -m kvbench.bench predict``: roofline times and bytes by model, method, context, batch and GPU; needs no GPU.

Bytes are computed exactly (:mod:`kvbench.methods.bytes`). Times come from a roofline model
(:mod:`kvbench.profiling.roofline`), which leaves out launches, Cocktail's search and the dequantization in a kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.bench import choices
from kvbench.bench.choices import duration, method_of, numbers_of, positive, positive_number, share, tokens
from kvbench.bench.prediction import BytesRow, Case, PredictedRow, flat_numbers, outside_the_roofline, predicted_bytes
from kvbench.bench.report import json_file, write_json
from kvbench.errors import ConfigError
from kvbench.methods.load import load_method
from kvbench.profiling.roofline import GPUS, KERNELS, Gpu, Shape, gpu_named, own_gpu
from kvbench.util.requirements import check_writable
from kvbench.util.table import render_table, size

#: columns of the table: heading, figure of a row, and the factor from its unit to that of the heading
COLUMNS: dict[str, tuple[str, float]] = {
    "model": ("model", 1),
    "gpu": ("gpu", 1),
    "method": ("method", 1),
    "B": ("batch", 1),
    "prompt": ("context", 1),
    "TTFT s": ("ttft_s", 1),
    "TPOT ms": ("tpot_s", 1e3),
    "expected": ("expected_tpot_s", 1e3),
    "x fp16": ("over_fp16", 1),
    "tok/s": ("tokens_per_s", 1),
    "bound": ("bound", 1),
    "KV time %": ("kv_share", 100),
    "KV GiB": ("kv_bytes", 2**-30),
    "KV %": ("kv_of_fp16", 100),
    "prefill GiB": ("prefill_peak_bytes", 2**-30),
    "decode GiB": ("decode_peak_bytes", 2**-30),
    "fits": ("fits", 1),
    "max B": ("max_batch", 1),
}


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``predict``."""
    parser.description, add = __doc__, parser.add_argument
    about = "models: presets, OWNER/NAME of the hub, folders with config.json, or YAML files of models"
    add("--model", nargs="+", default=["llama2-7b"], help=about)
    settings = ["fp16", "kivi:int4", "kivi:int2"]
    about = "settings, such as fp16 kivi:int4:residual=64 cocktail:split=10/30/60 quantspec:draft_weights=int4"
    # --methods was the name until all commands had the same
    names, shown = ("--settings", "--methods"), "METHOD[:QUANTIZER][:KEY=VALUE]"
    add(*names, dest="methods", nargs="+", default=settings, metavar=shown, help=about)
    about = "prompt lengths in tokens"
    add("--contexts", nargs="+", type=tokens, default=[4096, 32768, 131072], metavar="N", help=about)
    add("--batches", nargs="+", type=positive_number, default=[1], metavar="B")
    add("--gpu", nargs="+", default=["h200"], help=f"GPUs: {', '.join(GPUS)}")
    about = "describe another GPU: its achievable bandwidth in TB/s (requires --tflops and --memory-gb)"
    add("--bandwidth-TBs", type=positive, help=about)
    add("--tflops", type=positive, help="describe another GPU: bf16 TFLOP/s that a large matmul achieves")
    add("--memory-gb", type=positive, help="memory in GiB of the described GPU, or of the GPUs of --gpu")
    about = "tokens to generate; TPOT is that of the middle token, and tok/s includes the prefill"
    add("--new-tokens", type=positive_number, default=1, help=about)
    about = "bits of the weights of linear layers and lm_head"
    add("--weight-bits", type=int, choices=[4, 8, 16], default=16, help=about)
    about = "number of weights that share a scale and a zero point (below 16 bits)"
    add("--weight-group", type=positive_number, default=128, help=about)
    about = "16: lm_head has 16 bits, as with model.weights=int4 (default: --weight-bits, as with int4_all)"
    add("--head-bits", type=int, choices=[16], help=about)
    add("--acceptance", type=share, default=0.9, help="probability that a drafted token is accepted (quantspec)")
    about = "microseconds per layer in addition to the time for its bytes and FLOPs (0: pure roofline)"
    add("--overhead-us", type=duration, default=0.0, help=about)
    add("--prefill-chunk", type=tokens, metavar="N", help="prompt tokens per forward pass (default: all)")
    add("--prefill-rows", type=choices.prefill_rows, default="auto", metavar="N", help=choices.PREFILL_ROWS)
    about = "tokens that feed-forward layers process at a time, like runtime.mlp_chunk: auto, none, or a number"
    add("--mlp-chunk", type=mlp_chunk, default="auto", metavar="N", help=about)
    add("--out", type=Path, help="folder for a JSON file with all figures, or the file (default: none)")
    add("--name", help="name of the JSON file (default: predict)")


def mlp_chunk(text: str) -> int | Literal["auto"] | None:
    """Parse ``auto``, ``none`` or ``null`` (None: all tokens), or a number of tokens (an argparse ``type``)."""
    if text == "auto":
        return "auto"
    return None if text in ("none", "null") else tokens(text)


def gpus_of(args: argparse.Namespace) -> list[Gpu]:
    """Return the GPUs named by ``--gpu``, or the GPU described by ``--bandwidth-TBs``, ``--tflops``, ``--memory-gb``.

    Raises:
        ConfigError: a GPU is unknown, or one of the options that describe a GPU is missing.
    """
    own = args.bandwidth_TBs, args.tflops
    if all(own):
        if args.memory_gb is None:
            problem = "is required with --bandwidth-TBs and --tflops"
            raise ConfigError("--memory-gb", None, problem, hint="--memory-gb 80")
        return [own_gpu(args.bandwidth_TBs, args.tflops, args.memory_gb)]
    if any(own):
        missing = "--tflops" if args.bandwidth_TBs else "--bandwidth-TBs"
        problem = "is missing: the description of a GPU needs both --bandwidth-TBs and --tflops"
        raise ConfigError(missing, None, problem, hint=f"{missing} 2.0")
    gpus = [gpu_named(name) for name in args.gpu]
    return [replace(gpu, memory_gib=args.memory_gb) for gpu in gpus] if args.memory_gb else gpus


def print_predictions(args: argparse.Namespace) -> int:
    """Print predicted times and memory, with ``--out`` also into a JSON file; return 0.

    For models that the roofline does not describe, only bytes are predicted.

    Raises:
        ConfigError: a model, GPU or method is unknown, or a method cannot run with a model.
    """
    if args.out is not None:
        check_writable(str(args.out), "--out", file=args.out.suffix == ".json")
    configs = {name: numbers_of(name) for name in args.model}
    described = {name: numbers for name, numbers in configs.items() if not outside_the_roofline(numbers)}
    lines, only_bytes = roofline_rows(args, described), list[BytesRow]()
    for name, numbers in configs.items():
        if name not in described:
            methods = {text: method_of(text) for text in args.methods}
            only_bytes += predicted_bytes(name, numbers, methods, args.contexts, args.batches, args.new_tokens)
    tables = [shown_predictions(lines, args)] * bool(lines) + [shown_bytes(only_bytes)] * bool(only_bytes)
    print("\n\n".join(tables))
    if args.out is not None:
        gpus = {gpu.name: {**asdict(gpu), "read": gpu.read, "matmul": gpu.matmul} for gpu in gpus_of(args)}
        content = {"argv": args.argv, "gpus": gpus, "rows": [asdict(row) for row in lines]}
        content |= {"bytes": [asdict(row) for row in only_bytes]} if only_bytes else {}
        path = json_file(args, "predict")
        write_json(path, content)
        print(f"\n{path}")
    return 0


def roofline_rows(args: argparse.Namespace, configs: Mapping[str, Mapping[str, Any]]) -> list[PredictedRow]:
    """Predict times and memory for each combination of model, GPU, context, batch and method, and return the rows.

    `configs` are the models' dimensions by name (:func:`numbers_of`).

    Raises:
        ConfigError: a GPU or method is unknown, or a method cannot run with a model.
    """
    gpus, methods = gpus_of(args), {text: method_of(text) for text in args.methods}
    shapes = {name: Shape.of(numbers) for name, numbers in configs.items()}
    for method in methods.values():
        for shape in shapes.values():
            method.check(shape.channels)
    rows, exact = list[PredictedRow](), load_method("fp16")
    for name, shape in shapes.items():
        for method in methods.values():
            method.suit(flat_numbers(configs[name]))
        for gpu in gpus:
            for context in args.contexts:
                for batch in args.batches:
                    base = Case(shape, exact, batch, context, gpu, args).row(name, "fp16", None)
                    for text, method in methods.items():
                        rows.append(Case(shape, method, batch, context, gpu, args).row(name, text, base.tpot_s))
    return rows


def shown_predictions(rows: Sequence[PredictedRow], args: argparse.Namespace) -> str:
    """Format predictions as a table, followed by notes on its columns."""
    lines = [[_cell(getattr(row, name), factor) for name, factor in COLUMNS.values()] for row in rows]
    groups = ", all prompts read together" if args.prefill_rows is None else ", prompts read in groups"
    notes = [
        "The times are lower bounds from a roofline. expected: this bound plus the time that the kernels of a "
        f"compiled step take in addition to their bytes, {KERNELS} per layer.",
        f"KV %: bytes of keys and values as a share of fp16's; max B: largest number of sequences that fit{groups}.",
    ]
    if any(row.draft_s is not None for row in rows):
        notes.append(
            "Speculation: TPOT = (gamma * draft + verification) / E with an acceptance of "
            f"{args.acceptance:g} for each token; KV time % and bound refer to the verification."
        )
    return "\n".join([render_table(list(COLUMNS), lines, list(COLUMNS).index("TTFT s")), "", *notes])


def _cell(value: Any, factor: float) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value * factor


def shown_bytes(lines: Sequence[BytesRow]) -> str:
    """Format predictions as a table, followed by a note on what is missing and why."""
    head = ["model", "method", "B", "prompt", "keys and values", "state", "of fp16, %"]
    body = [
        (row.model, row.method, row.batch, row.context, size(row.kv_bytes), size(row.state_bytes), 100 * row.of_fp16)
        for row in lines
    ]
    note = (
        "Bytes only: the roofline's formulas for weights and times do not hold for mixtures of experts and hybrids.\n"
        "state: linear attention, Mamba and convolutions, which no method packs; the share of fp16 includes it."
    )
    return "\n".join([render_table(head, body, head.index("B")), "", note])
