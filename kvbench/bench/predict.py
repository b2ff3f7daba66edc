"""``python -m kvbench.bench predict``: roofline times and bytes by model, method, context, batch and GPU; needs no GPU.

Bytes are computed exactly (:mod:`kvbench.methods.bytes`). Times come from a roofline model
(:mod:`kvbench.profiling.roofline`), which leaves out launches, Cocktail's search and the dequantization in a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.bench import choices, predict_bytes
from kvbench.bench.choices import duration, method_of, numbers_of, positive, positive_number, share, tokens
from kvbench.bench.prediction import Case, Row
from kvbench.bench.prediction import draft_weights as draft_weights
from kvbench.errors import ConfigError, KvbenchError
from kvbench.methods.load import load_method
from kvbench.profiling.roofline import GPUS, KERNELS, Gpu, Shape, gpu_named, own_gpu
from kvbench.util import atomic
from kvbench.util.requirements import check_writable
from kvbench.util.table import render_table


def add_parser(commands: Any) -> None:
    """Add the subcommand ``predict`` with its options to the bench's command line."""
    add = commands.add_parser(
        "predict",
        help="predict TTFT, TPOT, memory and the largest batch with a roofline; does not need a GPU",
        description=__doc__,
    ).add_argument
    add(
        "--model",
        nargs="+",
        default=["llama2-7b"],
        help="models: presets, OWNER/NAME of the hub, folders with config.json, or YAML files of models",
    )
    add(
        "--settings",
        "--methods",  # its name until all commands had the same
        dest="methods",
        nargs="+",
        default=["fp16", "kivi:int4", "kivi:int2"],
        metavar="METHOD[:QUANTIZER][:KEY=VALUE]",
        help="settings, such as fp16 kivi:int4:residual=64 cocktail:split=10/30/60 quantspec:draft_weights=int4",
    )
    add(
        "--contexts",
        nargs="+",
        type=tokens,
        default=["4k", "32k", "128k"],
        metavar="N",
        help="prompt lengths in tokens",
    )
    add("--batches", nargs="+", type=positive_number, default=[1], metavar="B")
    add("--gpu", nargs="+", default=["h200"], help=f"GPUs: {', '.join(GPUS)}")
    add(
        "--bandwidth-TBs",
        type=positive,
        help="describe another GPU: its achievable bandwidth in TB/s (requires --tflops and --memory-gb)",
    )
    add("--tflops", type=positive, help="describe another GPU: bf16 TFLOP/s that a large matmul achieves")
    add("--memory-gb", type=positive, help="memory in GiB of the described GPU, or of the GPUs of --gpu")
    add(
        "--new-tokens",
        type=positive_number,
        default=1,
        help="tokens to generate; TPOT is that of the middle token, and tok/s includes the prefill",
    )
    add(
        "--weight-bits",
        type=int,
        choices=[4, 8, 16],
        default=16,
        help="bits of the weights of linear layers and lm_head",
    )
    add(
        "--weight-group",
        type=positive_number,
        default=128,
        help="number of weights that share a scale and a zero point (below 16 bits)",
    )
    add(
        "--head-bits",
        type=int,
        choices=[16],
        help="16: lm_head has 16 bits, as with model.weights=int4 (default: --weight-bits, as with int4_all)",
    )
    add("--acceptance", type=share, default=0.9, help="probability that a drafted token is accepted (quantspec)")
    add(
        "--overhead-us",
        type=duration,
        default=0.0,
        help="microseconds per layer in addition to the time for its bytes and FLOPs (0: pure roofline)",
    )
    add("--prefill-chunk", type=tokens, metavar="N", help="prompt tokens per forward pass (default: all)")
    add(
        "--prefill-rows",
        type=choices.prefill_rows,
        default="auto",
        metavar="N",
        help="prompts per forward pass: auto (up to 16k tokens in total), all, or a number",
    )
    add(
        "--mlp-chunk",
        type=mlp_chunk,
        default="auto",
        metavar="N",
        help="tokens that feed-forward layers process at a time, like runtime.mlp_chunk: auto, none, or a number",
    )
    add("--out", type=Path, help="folder for a JSON file with all figures (default: none)")
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
            raise ConfigError(
                "--memory-gb", None, "is required with --bandwidth-TBs and --tflops", hint="--memory-gb 80"
            )
        return [own_gpu(args.bandwidth_TBs, args.tflops, args.memory_gb)]
    if any(own):
        missing = "--tflops" if args.bandwidth_TBs else "--bandwidth-TBs"
        raise ConfigError(
            missing,
            None,
            "is missing: the description of a GPU needs both --bandwidth-TBs and --tflops",
            hint=f"{missing} 2.0",
        )
    gpus = [gpu_named(name) for name in args.gpu]
    return [replace(gpu, memory_gib=args.memory_gb) for gpu in gpus] if args.memory_gb else gpus


def byte_rows(args: argparse.Namespace) -> list[predict_bytes.BytesRow]:
    """Predict the bytes of the caches of models that the roofline does not describe (:mod:`.predict_bytes`).

    Raises:
        ConfigError: a model or method is unknown, or a method cannot run with a model.
    """
    lines: list[predict_bytes.BytesRow] = []
    for name in args.model:
        numbers = numbers_of(name)
        if predict_bytes.outside_the_roofline(numbers):
            methods = {text: method_of(text) for text in args.methods}
            lines += predict_bytes.predict_byte_rows(
                name, numbers, methods, args.contexts, args.batches, args.new_tokens
            )
    return lines


def predict_times(args: argparse.Namespace) -> list[Row]:
    """Predict times and memory for each combination of model, GPU, context, batch and method, and return the rows.

    Models that the roofline does not describe are left out.

    Raises:
        ConfigError: a model, GPU or method is unknown, or a method cannot run with a model.
    """
    gpus, methods = gpus_of(args), {text: method_of(text) for text in args.methods}
    configs = {name: numbers_of(name) for name in args.model}
    shapes = {
        name: Shape.of(numbers) for name, numbers in configs.items() if not predict_bytes.outside_the_roofline(numbers)
    }
    for method in methods.values():
        for shape in shapes.values():
            method.check(shape.channels)
    rows, exact = [], load_method("fp16")
    for name, shape in shapes.items():
        for method in methods.values():
            method.suit(predict_bytes.flat(configs[name]))
        for gpu in gpus:
            for context in args.contexts:
                for batch in args.batches:
                    base = Case(shape, exact, batch, context, gpu, args).row(name, "fp16", None)
                    for text, method in methods.items():
                        rows.append(Case(shape, method, batch, context, gpu, args).row(name, text, base.tpot_s))
    return rows


def run_predict(args: argparse.Namespace) -> int:
    """Print predicted times and memory, with ``--out`` also into a JSON file; return 0, or 2 for an error."""
    try:
        if args.out is not None:
            check_writable(str(args.out), "--out")
        lines, only_bytes = predict_times(args), byte_rows(args)
        print(
            "\n\n".join(
                [times_table(lines, args)] * bool(lines) + [predict_bytes.bytes_table(only_bytes)] * bool(only_bytes)
            )
        )
        if args.out is not None:
            path = args.out / f"{args.name or 'predict'}.json"
            gpus = {gpu.name: {**asdict(gpu), "read": gpu.read, "matmul": gpu.matmul} for gpu in gpus_of(args)}
            content = {"argv": args.argv, "gpus": gpus, "rows": [asdict(row) for row in lines]}
            content |= {"bytes": [asdict(row) for row in only_bytes]} if only_bytes else {}
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
            print(f"\n{path}")
    except (KvbenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def times_table(rows: list[Row], args: argparse.Namespace) -> str:
    """Format predictions as a table, followed by notes on its columns."""
    head = [
        "model",
        "gpu",
        "method",
        "B",
        "prompt",
        "TTFT s",
        "TPOT ms",
        "expected",
        "x fp16",
        "tok/s",
        "bound",
        "KV time %",
    ]
    head += ["KV GiB", "KV %", "prefill GiB", "decode GiB", "fits", "max B"]
    lines = []
    for row in rows:
        memory = (row.kv_bytes, row.prefill_peak_bytes, row.decode_peak_bytes)
        kv, prefill, decode = (size / 2**30 for size in memory)
        time = (row.ttft_s, 1e3 * row.tpot_s, 1e3 * row.expected_tpot_s, row.over_fp16, row.tokens_per_s)
        name = (row.model, row.gpu, row.method, row.batch, row.context)
        sizes = (kv, 100 * row.kv_of_fp16, prefill, decode, "yes" if row.fits else "no", row.max_batch)
        lines.append((*name, *time, row.bound, 100 * row.kv_share, *sizes))
    groups = ", all prompts read together" if args.prefill_rows is None else ", prompts read in groups"
    notes = [
        "The times are lower bounds from a roofline. expected: this bound plus the time that the kernels of a "
        "compiled step take in addition to"
        f" their bytes, {KERNELS} per layer."
    ]
    notes += [
        f"KV %: bytes of keys and values as a share of fp16's; max B: largest number of sequences that fit{groups}."
    ]
    if any(row.draft_s is not None for row in rows):
        notes.append(
            "Speculation: TPOT = (gamma * draft + verification) / E with an acceptance of "
            f"{args.acceptance:g} for each token; KV time % and bound refer to the verification."
        )
    return "\n".join([render_table(head, lines, head.index("TTFT s")), "", *notes])
