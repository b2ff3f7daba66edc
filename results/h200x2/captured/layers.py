"""Measure captured steps with the layers on one GPU and on two, and compare their tokens; needs two GPUs.

python results/h200x2/captured/layers.py OUT [--points SETTING:compiled|plain:TOKENS ...] [--steps 130] [--no-tiny]

The 7B model has random weights and a cache of random keys and values; both layouts have the same ones. Milliseconds are
medians of the steps after the third. Then the bundled model answers two prompts of 500 random tokens in either layout.
Results are written after each measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from experiments.kernels.greedy import load_on_device
from kvbench.bench import report
from kvbench.cache.progress import Options
from kvbench.config.setting import parse_setting
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.sampling import Sampling
from kvbench.measure.random_fill import go_on
from kvbench.methods import load_method
from kvbench.models.load import hf_config
from kvbench.models.spec import ModelConfig
from kvbench.parallel.spread import balanced, connect, random_spread
from kvbench.util.confdir import conf_dir
from kvbench.util.schema import build

POINTS = ["fp16:compiled:32768", "kivi int4:compiled:32768", "fp16:plain:32768", "kivi int4:plain:32768"]
SAMPLED = Sampling(0.9, 0.95, 11)
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp16": ("fp16", {}, {}),
    "kivi int4": ("kivi", {"quantizer": "int4"}, {}),
    "logquant int2, W 42": ("logquant", {"window": 42}, {}),
    "quantspec, gamma 3": ("quantspec", {"gamma": 3}, {}),
    "streamingllm": ("streamingllm", {"budget": 128}, {}),
    "fp16, sampled": ("fp16", {}, {"sampling": SAMPLED}),
    "quantspec, gamma 3, sampled": ("quantspec", {"gamma": 3}, {"sampling": SAMPLED}),
    "h2o": ("h2o", {}, {}),
    "snapkv": ("snapkv", {"budget": 128}, {}),
    "kivi int4, compiled": ("kivi", {"quantizer": "int4"}, {"compile": True}),
    "quantspec, kivi int2 drafts": (
        "quantspec",
        {"gamma": 3, "draft": "kivi", "draft_options": {"quantizer": "int2"}},
        {},
    ),
    "quantspec, 4-bit draft weights": ("quantspec", {"gamma": 4, "draft_weights": "int4_all"}, {}),
    "kivi int2, 2 sinks": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 2}, {}),
}
GPUS = [torch.device("cuda", index) for index in range(2)]


class Record:
    """Results, written to a file as they come."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.perf_counter()
        self.content: dict[str, Any] = {"what": "captured steps, layers on one GPU and on two", **report.machine()}

    def add(self, part: str, line: dict[str, Any]) -> None:
        """Add a line to a part of the results."""
        self.content.setdefault(part, []).append(line)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        print(f"{time.perf_counter() - self.began:6.1f} s  {line}", flush=True)


def first_difference(one: list[int], two: list[int]) -> int | None:
    """Return the first index at which two lists of tokens differ; None if they are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)


def measured(model: Any, setting: str, compile: bool, tokens: int, steps: int) -> tuple[dict[str, Any], list[int]]:
    """Return figures of captured steps after `tokens` random tokens, and the new tokens."""
    method = parse_setting(setting.replace(" ", ":")).load()
    cache = method.new_cache(model, None, max_length=tokens + steps + 16)
    generation = go_on(
        model, cache, 1, tokens, max_new_tokens=steps, sampling=Sampling(), graphs="always", compile=compile
    )
    method.detach(model)
    times = sorted(1e3 * second for second in generation.step_s[3:])
    figures = {
        "median_ms": round(median(times), 3),
        "least_ms": round(times[0], 3),
        "p90_ms": round(times[int(0.9 * len(times))], 3),
        "steps": len(times),
        "stepping": generation.stepping,
        "path": cache.path,
        "capture_s": round(generation.capture_s, 2),
    }
    if generation.rounds:
        figures["tokens_a_round"] = round(sum(r.emitted[0] for r in generation.rounds) / len(generation.rounds), 3)
    return figures, generation.tokens[0]


def seven_billion(record: Record, points: list[str], steps: int) -> None:
    """Measure a 7B model with random weights."""
    data = yaml.safe_load((conf_dir() / "model" / "llama2-7b.yaml").read_text(encoding="utf-8"))
    shape = build(ModelConfig, {**data, "weights": "random", "dtype": "bfloat16", "max_length": 2**18}, "model")
    models = [random_spread(hf_config(shape), torch.bfloat16, GPUS[:count], 0) for count in (1, 2)]
    for point in points:
        setting, how, tokens = point.rsplit(":", 2)
        line: dict[str, Any] = {"setting": setting, "compiled": how == "compiled", "context": int(tokens)}
        try:
            one, two = (measured(model, setting, how == "compiled", int(tokens), steps) for model in models)
            line |= {"one": one[0], "two": two[0], "ratio": round(two[0]["median_ms"] / one[0]["median_ms"], 4)}
            line |= {"tokens": len(one[1]), "distinct": len(set(one[1])), "differ_at": first_difference(one[1], two[1])}
        except Exception as error:  # the next point may work
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        record.add("times", line)
        gc.collect()
        torch.cuda.empty_cache()


def answer(model: Any, name: str, new: int = 160) -> Any:
    """Return a captured answer of a model to two prompts, and the bytes of the cache."""
    method_name, options, more = TINY[name]
    method = load_method(method_name, **options)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, model.config.vocab_size, (2, 500), generator=generator).to(GPUS[0])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    cache = method.new_cache(model, max_length=500 + new)
    cache.options = Options(kernels="triton" if method_name == "h2o" else "cuda")  # no CUDA kernel observes attention
    try:
        generation = generate(model, cache, ids, mask, max_new_tokens=new, graphs="always", **more)
        return generation, cache.bill().used
    finally:
        method.detach(model)


def tiny(record: Record) -> None:
    """Compare answers of the bundled model in bf16."""
    one = load_on_device("tiny", "cuda:0")[0]
    two = deepcopy(one)
    where = balanced(two, GPUS)
    for part, device in where.items():
        two.get_submodule(part).to(device)
    connect(two, where)
    for name in TINY:
        line: dict[str, Any] = {"method": name}
        try:
            (left, used), (right, also) = (answer(model, name) for model in (one, two))
            differ = [first_difference(a, b) for a, b in zip(left.tokens, right.tokens, strict=True)]
            line |= {"stepping": [left.stepping, right.stepping], "differ_at": differ, "equal_bytes": used == also}
        except Exception as error:  # the next method may work
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        record.add("tokens", line)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file for the results")
    parser.add_argument("--points", nargs="*", default=POINTS)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--tiny", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    record = Record(args.out)
    if args.points:
        seven_billion(record, args.points, args.steps)
    if args.tiny:
        tiny(record)


if __name__ == "__main__":
    main()
