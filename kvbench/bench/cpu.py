"""``python -m kvbench.bench cpu``: packed caches against fp16's on this CPU, for each instruction set and thread count.

Contenders of a row are run in turn, and each gets the least time of its runs: processor time of the process with one
thread, wall time with more. A ratio is fp16's time over the setting's; fp16 is timed in both arithmetics (16 bits and
float32 over the same 16-bit cache) and its faster one counts. The same run compares the values with the reference path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

#: instruction sets, and whether ATEN_CPU_CAPABILITY limits torch, and with it the kernel, to one
SETS = {"best": False, "avx2": True}
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
    parser.add_argument("--runs", type=int, default=12, help="runs of each contender (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file, or its folder (default: results/cpu)")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)


def measure_cpu(args: argparse.Namespace) -> int:
    """Measure, write the JSON file and the table, and return the exit status: 1 if a value is wrong, else 0."""
    if args.part:
        for row in measured(args):
            print(json.dumps(row), flush=True)
        return 0
    rows = []
    for name in args.instructions:
        limit = {"ATEN_CPU_CAPABILITY": name} if SETS[name] else {}
        again = [sys.executable, "-m", "kvbench.bench", *args.argv, "--part"]
        with subprocess.Popen(again, env={**os.environ, **limit}, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = {"set": name, **json.loads(line)}
                rows.append(row)
                print(bench_line(row), flush=True)
        if process.returncode:
            return process.returncode
    from kvbench.bench import report

    place = (
        args.out if args.out is not None and args.out.suffix == ".json" else report.result_folder(args.out) / "cpu.json"
    )
    report.write_json(place, {"machine": report.machine(), "command": " ".join(args.argv), "rows": rows})
    print(f"# {place}")
    return int(any(not row["right"] for row in rows))


def bench_line(row: Mapping[str, Any]) -> str:
    """Format a row for the screen.

    The text gives its name, the kernel with its instruction set, the number of threads, the times in ms, their ratio
    with the least ratio that passes, and the check of the values.
    """
    gate = row["gate"] * (AVX2_SHARE if row["set"] == "avx2" else 1)
    return (
        f"{row['name']:34s} {row['kernel']:16s} {row['threads']} thr  fp16 {row['fp16_ms']:9.3f} ({row['fp16_in']})  "
        f"packed {row['ms']:9.3f} ({row['in']})  {row['ratio']:5.2f}x of {gate:.2f} "
        f"{'ok  ' if row['ratio'] >= gate else 'LESS'} {row['check']}{'' if row['right'] else ' WRONG'}"
    )


def least(contenders: Mapping[Any, Callable[[], object]], runs: int, threads: int) -> dict[Any, float]:
    """Run contenders in turn, and return the least time of each in ms."""
    clock = time.process_time if threads == 1 else time.perf_counter
    for contender in contenders.values():
        contender()
    times: dict[Any, float] = {}
    for _ in range(runs):
        for name, contender in contenders.items():
            start = clock()
            contender()
            times[name] = min(times.get(name, float("inf")), (clock() - start) * 1000)
    return times


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all rows with the instruction set and the threads of this process."""
    import torch

    for threads in args.threads or sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for rows in (attention, steps, perplexity, prefills, looked_up_steps):
            yield from rows(args, threads)


def chosen(args: argparse.Namespace, start: str) -> list[str]:
    """Return the names of the rows to measure that begin with a text."""
    return [name for name in GATES if name.startswith(start) and args.only in name]


def ratios(
    name: str, threads: int, times: Mapping[tuple[str, str], float], setting: str, right: bool, check: str
) -> dict[str, Any]:
    """Return a row from the least times of (fp16 or `setting`, arithmetic): the faster arithmetic of each counts."""
    from kvbench.attention.cpu import build

    (fp16_ms, fp16_in), (ms, arithmetic) = (
        min((value, key[1]) for key, value in times.items() if key[0] == what) for what in ("fp16", setting)
    )
    return {
        "name": name, "kernel": build.kernel_name(), "threads": threads, "gate": GATES[name], "fp16_ms": fp16_ms,
        "fp16_in": fp16_in, "ms": ms, "in": arithmetic, "ratio": fp16_ms / ms,
        "all_ms": {" ".join(key): value for key, value in times.items()}, "right": right, "check": check,
    }  # fmt: skip


def attention(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Measure decode attention of one layer, over random codes, against torch's SDPA over as many exact tokens."""
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
        times = least(contenders, args.runs, threads)
        right = errors[0] < 4.5e-3 and errors[1] < 2e-5
        yield ratios(name, threads, times, "packed", right, f"error {errors[0]:.1e}, {errors[1]:.1e}")


def sdpa(query: Any, stored: Any, scaling: float) -> Any:
    """Compute attention to exact keys and values ``[2, B, H, n, D]`` as the fp16 path of a decode step does."""
    from kvbench.attention.reference import one_token

    return one_token(query, stored[0].to(query.dtype), stored[1].to(query.dtype), scaling)


def dtype_label(dtype: Any) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def models(tiny: bool) -> dict[str, Any]:
    """Return a model with random weights in both arithmetics, with caches in bfloat16, by name of the arithmetic."""
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
    """Return the method, and its options, of a setting in a row's name."""
    method, _, quantizer = name.partition(":")
    return method, {"quantizer": quantizer} if quantizer else {}


def steps(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
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
        for setting in ("fp16", *settings):
            for arithmetic, model in built.items():
                method, options = setting_of(setting)
                cache = load_method(method, **options).new_cache(model, max_length=tokens + 4 * args.runs)
                fill_at_random(model, cache, batch, tokens)
                if setting != "fp16":
                    twin = cache.clone()
                    twin.options = Options(kernels="reference")
                    wanted, found = (
                        decode_logits(model, twin, batch).float(),
                        decode_logits(model, cache, batch).float(),
                    )
                    checks[setting, arithmetic] = float((found - wanted).norm() / wanted.norm()), cache.path
                contenders[setting, arithmetic] = partial(decode_logits, model, cache, batch)
        times = least(contenders, args.runs, threads)
        for setting in settings:
            mine = {key: value for key, value in times.items() if key[0] in ("fp16", setting)}
            errors, paths = zip(*(checks[setting, arithmetic] for arithmetic in built), strict=True)
            right = errors[1] < 1e-4  # of random weights, many layers in 16 bits turn any rounding into noise
            check = f"logits {errors[0]:.1e}, {errors[1]:.1e}; {'; '.join(sorted(set(paths)))}"
            yield ratios(f"step {shape} {setting}", threads, mine, setting, right, check)


def decode_logits(model: Any, cache: Any, batch: int) -> Any:
    """Run a decode step and return its logits."""
    import torch

    with torch.inference_mode():
        return model(torch.arange(batch)[:, None] + 3, past_key_values=cache).logits


def perplexity(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Measure the likelihood of a window of 2,048 tokens, fed as decoding would feed it."""
    for name in chosen(args, "perplexity"):
        setting, built = name.rpartition(" ")[2], models(tiny=False)
        contenders = {
            (what, arithmetic): partial(nll, model, what)
            for what in ("fp16", setting)
            for arithmetic, model in built.items()
        }
        wanted, found = (nll(built["float32"], setting, kernels) for kernels in ("reference", "auto"))
        times = least(contenders, 2, threads)
        yield ratios(name, threads, times, setting, abs(found / wanted - 1) < 1e-5, f"nll {found:.4f}, {wanted:.4f}")


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


def prefills(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
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
        times = least(contenders, 1, threads)
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


def looked_up_steps(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
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
            cache = load_method(setting).new_cache(model, max_length=tokens + 4 * args.runs)
            fill_at_random(model, cache, 1, tokens)
            twin = cache.clone()
            twin.options = Options(kernels="reference")
            wanted, found = (decode_logits(model, x, 1).float() for x in (twin, cache))
            errors[dtype], layers = float((found - wanted).norm() / wanted.norm()), len(cache.layers)
            contenders[setting, dtype_label(dtype)] = partial(decode_logits, model, cache, 1)
        times: dict[tuple[str, str], float] = least(contenders, args.runs, threads)
        times["fp16", "limit"] = KVQUANT_MS * layers
        check = f"logits {errors[torch.bfloat16]:.1e}, {errors[torch.float32]:.1e}; {cache.path}"
        yield ratios(name, threads, times, setting, errors[torch.float32] < 1e-4, check)
