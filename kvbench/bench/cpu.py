"""``python -m kvbench.bench cpu``: packed caches against fp16's on this CPU, for each instruction set and thread count.

Contenders of a row are run in turn, and each gets the least time of its runs: processor time of the process with one
thread, wall time with more. A ratio is fp16's time over the setting's; both are timed in both arithmetics (16 bits and
float32 over the same 16-bit cache) and the faster one counts. The same run compares the values with the reference path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

#: instruction sets, and the variables that limit torch, with it the kernel, and oneDNN to one
SETS = {"best": {}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
#: rows by name: ratio that is required of the best instruction set
GATES = {
    "attention tiny 32k int4": 2.0,
    "attention tiny 32k int2": 2.6,
    "attention 32/8 heads 32k int4": 1.6,
    "attention 32/8 heads 32k int2": 2.0,
    "step tiny 32k kivi:int4": 1.3,
    "step 30 layers 4k kivi:int4": 1.0,
    "step 30 layers 4k kivi:int2": 1.1,
    "step 30 layers 4k logquant": 1.0,
    "step 30 layers 4k atom": 1.0,
    "step 30 layers 8k kivi:int4": 1.0,
    "step 30 layers 8k kivi:int2": 1.1,
    "step 30 layers 8k logquant": 1.0,
    "step 30 layers 8k atom": 1.0,
    "step tiny 8 x 2k kivi:int4": 0.9,
    "step tiny 8 x 2k kivi:int2": 0.9,
    "perplexity 30 layers 2k kivi:int2": 0.9,
    "prefill tiny 16k h2o": 1 / 1.6,
    "limit tiny 8k kvquant": 1.0,  # 3 ms a layer, in the place of fp16's time, over its time
}
#: ms of a step per layer that KVQuant may take
KVQUANT_MS = 3.0
#: share of a gate that AVX2 alone must reach
AVX2_SHARE = 0.8
#: heads of a layer: (KV heads, query heads per KV head, channels)
SHAPES = {"tiny": (2, 3, 64), "32/8 heads": (8, 4, 128)}
#: sizes of SmolLM2-135M
SMALL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8448,
    "tie_word_embeddings": True,
}


def add_cpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cpu``."""
    parser.add_argument("--instructions", nargs="+", choices=SETS, default=list(SETS), help="default: %(default)s")
    parser.add_argument("--threads", nargs="+", type=int, help="default: 1, and all that torch uses")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only rows whose name contains this")
    parser.add_argument("--runs", type=int, default=12, help="most runs of each contender (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=10.0,
        help="contenders are not run again after so many seconds (default: %(default)s); all rows, with both "
        "instruction sets, one thread and all threads, then take about 20 minutes",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file, or its folder (default: results/cpu); the table goes beside it, as Markdown",
    )
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)


def measure_cpu(args: argparse.Namespace) -> int:
    """Measure, write the JSON file and the table, and return the exit status: 1 if a value is wrong, else 0."""
    if args.part:
        for row in measured(args):
            print(json.dumps(row), flush=True)
        return 0
    rows = []
    began = time.perf_counter()
    for name in args.instructions:
        again = [sys.executable, "-m", "kvbench.bench", *args.argv, "--part"]
        with subprocess.Popen(again, env={**os.environ, **SETS[name]}, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                if name == "avx2":
                    row["gate"] *= AVX2_SHARE
                rows.append(row)
                print("  ".join(cells(row)), flush=True)
        if process.returncode:
            return process.returncode
    from kvbench.bench import report
    from kvbench.util import atomic

    place = report.json_file(args, "cpu")
    about = {**report.machine(), "command": " ".join(args.argv), "seconds": round(time.perf_counter() - began)}
    report.write_json(place, {**about, "rows": rows})
    atomic.replace_file(place.with_suffix(".md"), markdown(about, rows).encode())
    print(f"{place}, {place.with_suffix('.md')} ({about['seconds']} s)")
    return int(any(not row["right"] for row in rows))


#: columns of the table
HEADS = ("", "kernel", "threads", "fp16, ms", "packed, ms", "ratio", "at least", "check of values")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a row for the columns of :data:`HEADS`; a time is that of the faster arithmetic, which it names."""
    return (
        row["name"],
        row["kernel"],
        str(row["threads"]),
        f"{row['fp16_ms']:.3f} ({row['fp16_in']})",
        f"{row['ms']:.3f} ({row['in']})",
        f"{row['ratio']:.2f}x" if row["ratio"] >= row["gate"] else f"**{row['ratio']:.2f}x**",
        f"{row['gate']:.2f}x",
        row["check"] if row["right"] else f"**WRONG**: {row['check']}",
    )


def markdown(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the machine, the command and the rows as a Markdown table, with ratios below the required one in bold."""
    lines = [HEADS, ("---", "---", *["--:"] * 5, "---"), *map(cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"`python -m kvbench.bench {about['command']}` on {about['device']}, torch {about['versions']['torch']}, "
        f"{about['date'][:10]}, {about['seconds']} s. Least of alternating runs: processor time with one thread, wall "
        "time with more; each in the faster of two arithmetics over a cache in bfloat16. Errors: of attention in "
        "bfloat16 and in float32, of logits in float32.\n\n"
        f"{table}\n"
    )


def least(contenders: Mapping[Any, Callable[[], object]], args: argparse.Namespace, threads: int) -> dict[Any, float]:
    """Run contenders in turn with a number of threads, and return the least time of each in ms.

    Each is run at least once, at most ``--runs`` times, until ``--seconds`` have passed. Those that take less than a
    second are run once before.
    """
    import torch

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[Any, float] = {}
    end = time.perf_counter() + args.seconds
    for turn in range(args.runs + 1):
        if turn and time.perf_counter() > end:
            break
        if turn == 1 and max(times.values()) < 1000:
            times.clear()  # the first run of each finds no memory allocated and nothing in the processor's caches
        for name, contender in contenders.items():
            start = clock()
            contender()
            times[name] = min(times.get(name, float("inf")), (clock() - start) * 1000)
    return times


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all rows with the instruction set of this process."""
    import torch

    args.threads = args.threads or sorted({1, torch.get_num_threads()})
    for rows in (attention, steps, perplexity, prefills, looked_up_steps):
        yield from rows(args)


def chosen(args: argparse.Namespace, start: str) -> list[str]:
    """Return the names of the rows to measure that begin with `start`."""
    return [name for name in GATES if name.startswith(start) and args.only in name]


def ratios(
    name: str, threads: int, times: Mapping[tuple[str, str], float], setting: str, right: bool, check: str
) -> dict[str, Any]:
    """Return a row with fp16 and `setting`, each in its faster arithmetic; `times` are ms by (setting, arithmetic)."""
    from kvbench.attention.cpu import build

    (fp16_ms, fp16_in), (ms, arithmetic) = (
        min((value, key[1]) for key, value in times.items() if key[0] == what) for what in ("fp16", setting)
    )
    return {
        "name": name, "kernel": build.kernel_name(), "threads": threads, "gate": GATES[name], "fp16_ms": fp16_ms,
        "fp16_in": fp16_in, "ms": ms, "in": arithmetic, "ratio": fp16_ms / ms,
        "all_ms": {" ".join(key): value for key, value in times.items()}, "right": right, "check": check,
    }  # fmt: skip


def attention(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare decode attention over a layer of random codes with torch's SDPA over the same number of exact tokens."""
    import torch

    from kvbench.attention.cpu import decode
    from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error
    from kvbench.attention.work import Format

    for name in chosen(args, "attention"):
        shape, bits = name.removeprefix("attention ").split(" 32k int")
        heads, group, channels = SHAPES[shape]
        tokens, scaling = 32768, channels**-0.5
        keys, values = (
            [Piece(Format("affine", int(bits), axis, 32), [tokens]), Piece(FULL, [1])] for axis in ("channel", "token")
        )
        work = layer(keys, values, heads=heads, key_dim=channels, value_dim=channels, dtype=torch.bfloat16)
        stored = torch.randn(2, 1, heads, tokens, channels, dtype=torch.bfloat16)
        contenders: dict[tuple[str, str], Callable[[], object]] = {}
        errors = []
        for dtype in (torch.bfloat16, torch.float32):
            query = torch.randn(1, heads * group, 1, channels).to(dtype)
            errors.append(
                relative_error(decode.attend(query, work, scaling), dequantized_attention(query, work, scaling))
            )
            contenders["packed", dtype_label(dtype)] = partial(decode.attend, query, work, scaling)
            contenders["fp16", dtype_label(dtype)] = partial(sdpa, query, stored, scaling)
        right = errors[0] < 4.5e-3 and errors[1] < 2e-5
        for threads in args.threads:
            times = least(contenders, args, threads)
            yield ratios(name, threads, times, "packed", right, f"error {errors[0]:.1e}, {errors[1]:.1e}")


def sdpa(query: Any, stored: Any, scaling: float) -> Any:
    """Compute attention to exact keys and values ``[2, B, H, n, D]`` as the fp16 path of a decode step does."""
    from kvbench.attention.reference import one_token

    return one_token(query, stored[0].to(query.dtype), stored[1].to(query.dtype), scaling)


def dtype_label(dtype: Any) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


@cache
def models(tiny: bool) -> dict[str, Any]:
    """Return a random model in bfloat16 and in float32, by name of the dtype; both have caches in bfloat16."""
    import torch
    from transformers import AutoConfig

    from kvbench.models.load import random_model
    from kvbench.models.spec import BUNDLED, local_folder
    from kvbench.util.attachment import Placement, record_placement

    config: Any = (
        AutoConfig.from_pretrained(local_folder(f"{BUNDLED}tiny")) if tiny else AutoConfig.for_model("llama", **SMALL)
    )
    models_by_dtype = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = random_model(config, dtype, "cpu", seed=1)
        record_placement(model, Placement(storage=torch.bfloat16))
        models_by_dtype[dtype_label(dtype)] = model
    return models_by_dtype


def setting_of(name: str) -> tuple[str, dict[str, str]]:
    """Split a setting that is part of a row's name into a method and its options."""
    method, _, quantizer = name.partition(":")
    return method, {"quantizer": quantizer} if quantizer else {}


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure whole decode steps of models after long prompts, whose keys and values are random."""
    from kvbench.cache.progress import Options
    from kvbench.measure.random_fill import fill_at_random
    from kvbench.methods import load_method

    places: dict[str, list[str]] = {}
    for name in chosen(args, "step"):
        shape, _, setting = name.removeprefix("step ").rpartition(" ")
        places.setdefault(shape, []).append(setting)
    for shape, settings in places.items():
        kind, _, size = shape.rpartition(" ")
        batch = 8 if kind.endswith(" x") else 1
        tokens = int(size.removesuffix("k")) * 1024
        built = models(kind.startswith("tiny"))
        contenders: dict[tuple[str, str], Callable[[], object]] = {}
        checks = {}
        room = tokens + (args.runs + 1) * len(args.threads) + 1
        for setting in ("fp16", *settings):
            method, options = setting_of(setting)
            caches = [load_method(method, **options).new_cache(model, max_length=room) for model in built.values()]
            fill_at_random(next(iter(built.values())), caches[0], batch, tokens)
            caches[1:] = [caches[0].clone() for _ in caches[1:]]  # what is stored does not depend on the arithmetic
            for (arithmetic, model), filled in zip(built.items(), caches, strict=True):
                # of random weights, many layers in 16 bits turn any rounding into noise: float32 is compared
                if setting != "fp16" and arithmetic == "float32":
                    twin = filled.clone()
                    twin.options = Options(kernels="reference")
                    wanted, found = (decode_logits(model, cached, batch).float() for cached in (twin, filled))
                    checks[setting] = float((found - wanted).norm() / wanted.norm()), filled.path
                contenders[setting, arithmetic] = partial(decode_logits, model, filled, batch)
        for threads in args.threads:
            times = least(contenders, args, threads)
            for setting in settings:
                mine = {key: value for key, value in times.items() if key[0] in ("fp16", setting)}
                error, path = checks[setting]
                check = f"logits {error:.1e}; {path}"
                yield ratios(f"step {shape} {setting}", threads, mine, setting, error < 1e-4, check)


def decode_logits(model: Any, cache: Any, batch: int) -> Any:
    """Run a decode step and return its logits."""
    import torch

    with torch.inference_mode():
        return model(torch.arange(batch)[:, None] + 3, past_key_values=cache).logits


def perplexity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the computation of the likelihood of 2,048 tokens, with the result of decoding them one by one."""
    for name in chosen(args, "perplexity"):
        setting, built = name.rpartition(" ")[2], models(tiny=False)
        contenders = {
            (what, arithmetic): partial(nll, model, what)
            for what in ("fp16", setting)
            for arithmetic, model in built.items()
        }
        wanted, found = (nll(built["float32"], setting, kernels) for kernels in ("reference", "auto"))
        for threads in args.threads:
            times = least(contenders, args, threads)
            check = f"nll {found:.4f}, {wanted:.4f}"
            yield ratios(name, threads, times, setting, abs(found / wanted - 1) < 1e-5, check)


def nll(model: Any, setting: str, kernels: Any = "auto") -> float:
    """Return the negative log-likelihood of 2,048 random tokens with the cache of a setting."""
    import torch

    from kvbench.cache.progress import Options
    from kvbench.decoding.perplexity import decode_nll
    from kvbench.methods import load_method

    method, options = setting_of(setting)
    cache = load_method(method, **options).new_cache(model)
    cache.options = Options(kernels=kernels)
    ids = torch.randint(3, 49000, (1, 2048), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return float(decode_nll(model, cache, ids, 1))


def prefills(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the prefill of a long prompt whose attention the method observes."""
    import torch

    for name in chosen(args, "prefill"):
        _, shape, size, setting = name.split()
        tokens, built = int(size.removesuffix("k")) * 1024, models(tiny=shape == "tiny")
        ids = torch.randint(3, 4000, (1, tokens), generator=torch.Generator().manual_seed(0))
        contenders: dict[tuple[str, str], Callable[[], object]] = {
            (what, arithmetic): partial(fill, model, what, ids)
            for what in ("fp16", setting)
            for arithmetic, model in built.items()
        }
        error = columns_error()
        for threads in args.threads:
            times = least(contenders, args, threads)
            yield ratios(name, threads, times, setting, error < 2e-5, f"column sums {error:.1e}")


def fill(model: Any, setting: str, ids: Any) -> None:
    """Run the prefill of a prompt ``[1, T]`` into a new cache of a setting."""
    import torch

    from kvbench.decoding.passes import prefill
    from kvbench.methods import load_method

    method, options = setting_of(setting)
    with torch.inference_mode():
        prefill(model, load_method(method, **options).new_cache(model, max_length=ids.shape[1] + 8), ids, None)


def columns_error() -> float:
    """Return the relative error of column sums of attention, by the kernel, against a softmax in plain torch."""
    import torch

    from kvbench.attention.cpu import columns
    from kvbench.attention.observe import probabilities
    from kvbench.attention.synthetic import relative_error

    heads, group, channels = SHAPES["tiny"]
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads * group, 1024, channels, generator=rng)
    keys = torch.randn(1, heads, 1024, channels, generator=rng)
    scaling, wide = channels**-0.5, keys.repeat_interleave(group, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, lse = kernel(query, wide, wide, 0.0, True, scale=scaling)
    sums = torch.zeros(1, heads * group, 1024)
    columns.add_received(sums, query, keys, lse, [0], scaling)
    return relative_error(sums, probabilities(query, keys, None, scaling, 0).sum(2))


def looked_up_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure steps of the bundled model, which has a calibration, against the limit of ms per layer."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbench.cache.progress import Options
    from kvbench.measure.random_fill import fill_at_random
    from kvbench.methods import load_method
    from kvbench.models.spec import BUNDLED, local_folder
    from kvbench.util.attachment import Placement, record_placement

    for name in chosen(args, "limit"):
        _, _, size, setting = name.split()
        tokens, contenders, errors, layers = int(size.removesuffix("k")) * 1024, {}, {}, 0
        for dtype in (torch.bfloat16, torch.float32):
            model = AutoModelForCausalLM.from_pretrained(local_folder(f"{BUNDLED}tiny"), dtype=dtype).eval()
            record_placement(model, Placement(storage=torch.bfloat16))
            cache = load_method(setting).new_cache(model, max_length=tokens + 8 + len(args.threads) * (args.runs + 1))
            fill_at_random(model, cache, 1, tokens)
            twin = cache.clone()
            twin.options = Options(kernels="reference")
            wanted, found = (decode_logits(model, x, 1).float() for x in (twin, cache))
            errors[dtype], layers = float((found - wanted).norm() / wanted.norm()), len(cache.layers)
            contenders[setting, dtype_label(dtype)] = partial(decode_logits, model, cache, 1)
        check = f"logits {errors[torch.bfloat16]:.1e}, {errors[torch.float32]:.1e}; {cache.path}"
        for threads in args.threads:
            times = least(contenders, args, threads) | {("fp16", "limit"): KVQUANT_MS * layers}
            yield ratios(name, threads, times, setting, errors[torch.float32] < 1e-4, check)
