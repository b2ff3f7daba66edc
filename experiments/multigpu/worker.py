"""One layout's part: the bundled model's greedy tokens, then a 7B model with random weights on a filled cache.

    python -m experiments.multigpu.worker --layout one --out one.json
    torchrun --nproc-per-node 2 -m experiments.multigpu.worker --layout tensor_parallel --out tp.json

The file is written anew after every measurement, so that a later one that fails loses none.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.prompts import Prompt, loaded, new_cache, tasks
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.decoding import Sampling, generate
from kvbench.errors import KvbenchError
from kvbench.measure.random_fill import go_on
from kvbench.models.load import LoadedModel
from kvbench.parallel.team import current, leave

LAYOUTS = ("one", "device_map", "tensor_parallel")
#: methods whose tokens are compared
EQUAL: dict[str, str] = {
    "fp16": "fp16",
    "kivi int2": "kivi:int2",
    "cocktail bm25": "cocktail:encoder=bm25",
    "logquant int2, W 64": "logquant:window=64",
    "quantspec": "quantspec",
    "h2o": "h2o",
    "kvquant": "kvquant",
}
#: methods whose memory and time are measured
LONG: dict[str, str] = {"fp16": "fp16", "quantspec": "quantspec"}
#: how decode steps run; collectives in a captured step come last, as they are the least certain
GRAPHS = {"one": ("never", "auto"), "device_map": ("never", "auto"), "tensor_parallel": ("never", "always")}


class Record:
    """Measurements, written to a JSON file by rank 0 as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.perf_counter()
        self.content: dict[str, Any] = {}

    def add(self, part: str, name: str, value: Any) -> None:
        """Keep one measurement, and say so."""
        self.content.setdefault(part, {})[name] = value
        team = current()
        if team is None or team.rank == 0:
            self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            print(f"{time.perf_counter() - self.began:6.1f} s  {part}: {name}", flush=True)


def on_layout(name: str, layout: str, **changes: Any) -> LoadedModel:
    """Load a model of ``conf/model`` in a layout."""
    runtime = RuntimeConfig(
        device="auto" if layout != "one" or not torch.cuda.is_available() else "cuda:0",
        device_map="auto" if layout == "device_map" else None,
        tensor_parallel="auto" if layout == "tensor_parallel" else None,
    )
    return loaded(name, runtime, **changes)


@torch.inference_mode()
def answers(held: LoadedModel, prompt: Prompt, name: str, count: int) -> dict[str, Any]:
    """Return greedy tokens of one prompt, with the gap between the two best logits at each (a token per step)."""
    method = parse_setting(EQUAL[name]).load()
    cache, ids = new_cache(method, held.model, held.tokenizer, prompt, count)
    gaps: list[float] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        two = output.logits[0, -1].float().topk(2).values
        gaps.append(float(two[0] - two[1]))

    hook = held.model.register_forward_hook(note)
    try:
        generation = generate(held.model, cache, ids, max_new_tokens=count, graphs="never")
    finally:
        hook.remove()
        method.detach(held.model)
    used = cache.bill().used.total
    team = current()
    return {
        "tokens": generation.tokens[0],
        "gaps": [] if generation.rounds else gaps,
        "path": cache.path,
        "kv_bytes": team.exchange(used) if team else [used],
    }


def equality(record: Record, layout: str, dtype: str, names: list[str], count: int, prompts: int) -> None:
    """Record the tokens of the bundled model with every method."""
    held = on_layout("tiny", layout, dtype=dtype)
    given = tasks(held.tokenizer, 1024, prompts)
    for name in names:
        try:
            answered: Any = [answers(held, prompt, name, count) for prompt in given]
        except (KvbenchError, ImportError) as error:  # a package that this machine lacks
            answered = f"{type(error).__name__}: {error}"
        record.add(f"tokens {dtype}", name, answered)


def long(record: Record, held: LoadedModel, name: str, graphs: Any, context: int, steps: int) -> None:
    """Measure one method on a cache of `context` random tokens: bytes of every device, time per token."""
    gc.collect()  # what the last measurement left
    torch.cuda.empty_cache()
    devices = mine(held)
    weights = [torch.cuda.memory_allocated(device) for device in devices]
    method = parse_setting(LONG[name]).load()
    cache = method.new_cache(held.model, None, max_length=context + steps + 16)
    watch = Peaks(devices)
    generation = go_on(
        held.model, cache, 1, context, max_new_tokens=steps, sampling=Sampling(), graphs=graphs, observer=watch
    )
    path, stepping = cache.path, generation.stepping
    bill = cache.bill()
    method.detach(held.model)
    tokens = [round.emitted[0] for round in generation.rounds] or [1] * len(generation.step_s)
    seconds = [second / count for second, count in zip(generation.step_s, tokens, strict=True)][2:]
    value = {
        "tpot_ms": round(1e3 * sum(generation.step_s[2:]) / max(sum(tokens[2:]), 1), 3),
        "step_ms": round(1e3 * median(generation.step_s[2:]), 3),
        "worst_ms": round(1e3 * max(seconds), 3),
        "tokens_a_round": round(sum(tokens) / len(tokens), 2) if generation.rounds else None,
        "stepping": stepping,
        "path": path,
        "devices": [str(device) for device in devices],
        "weights": weights,
        "decode_peak": watch.decode,
        "kv_used": [bill.used.total],
        "kv_reserved": [bill.reserved.total],
    }
    del cache
    team = current()
    if team is not None:
        everyone = team.exchange(value) or []
        for key in ("devices", "weights", "decode_peak", "kv_used", "kv_reserved"):
            value[key] = [number for record_ in everyone for number in record_[key]]
    record.add(f"{context} tokens", f"{name}, graphs={graphs}", value)


class Peaks:
    """Peak bytes of decoding on each device of this process."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices, self.decode = devices, [0] * len(devices)

    def phase(self, name: str) -> None:
        """Note that a phase begins."""
        for number, device in enumerate(self.devices):
            if name == "end":
                self.decode[number] = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)


def mine(held: LoadedModel) -> list[torch.device]:
    """Return the devices of this process that hold a part of the model."""
    return sorted({parameter.device for parameter in held.model.parameters()}, key=str)


def main() -> None:
    """Measure everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--dtypes",
        nargs="*",
        default=["float32", "bfloat16"],
        help="data types of the bundled model (without a value: skip this part)",
    )
    parser.add_argument("--methods", nargs="*", default=list(EQUAL)[:5], choices=list(EQUAL))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument(
        "--context", type=int, default=131072, help="prompt length of the long part in tokens (0: skip this part)"
    )
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    record = Record(args.out)
    # the most wanted first: a limit on the time cuts off the end
    for dtype in args.dtypes[:1]:
        equality(record, args.layout, dtype, args.methods, args.tokens, args.prompts)
    if args.context:
        held = on_layout(
            args.model, args.layout, weights="random", dtype="bfloat16", max_length=args.context + args.steps + 16
        )
        record.add(
            "model",
            args.model,
            {"layout": held.layout, "devices": held.devices, "parameters": held.parameters},
        )
        for graphs in GRAPHS[args.layout]:
            if graphs != "never":
                more(record, args)
            for name in LONG:
                # a captured step is not made for few tokens by itself
                count = args.steps if graphs == "never" else max(args.steps, 72)
                try:
                    long(record, held, name, graphs, args.context, count)
                except torch.OutOfMemoryError as error:
                    if current() is not None:
                        raise
                    record.add(f"{args.context} tokens", f"{name}, graphs={graphs}", f"out of memory: {error}")
    more(record, args)
    leave()


def more(record: Record, args: argparse.Namespace) -> None:
    """Record the tokens in the other dtypes, once."""
    for dtype in args.dtypes[1:]:
        if f"tokens {dtype}" not in record.content:
            equality(record, args.layout, dtype, args.methods, args.tokens, args.prompts)


if __name__ == "__main__":
    main()
