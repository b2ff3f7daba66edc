"""Time of WikiText-2 perplexity in decode mode, extrapolated from some windows of random tokens on a random 7B.

    python results/h200/perplexity/measure.py --out perplexity.json

For each setting, one batch of windows is measured after a short warm-up. Methods whose tokens must go one by one are
measured over a few captured steps at several lengths. The time of the whole test set is that per window, times the
number of windows: 83 of 4096 tokens for Llama's 341,469 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvbench.config.setting import parse_setting
from kvbench.decoding.forced import Forced
from kvbench.decoding.graphs import Captured
from kvbench.decoding.passes import prefill
from kvbench.decoding.perplexity import decode_nll
from kvbench.models.load import random_model

#: number of tokens of WikiText-2's raw test set with Llama's tokenizer
TOKENS = 341_469
SETTINGS = (
    "fp16",
    "kivi:int4:residual=128",
    "atom:int4_token",
    "logquant:int2:window=64",
    "quantspec:hierarchical:gamma=0",
    "partial_logquant:int4:window=64",
    "kivi:int2:residual=128",
    "streamingllm",
)
#: methods whose tokens go one by one, in captured steps
STEPPED = ("streamingllm", "h2o")


def llama2_7b(layers: int) -> Any:
    """Return the configuration of Llama-2-7B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=8192,
    )


def seconds(model: Any, setting: str, rows: int, width: int, device: torch.device, chunk: Any) -> Any:
    """Return the seconds of one batch of random windows, its likelihood per token, and the attention path."""
    method = parse_setting(setting).load()
    ids = torch.randint(3, 32000, (rows, width), generator=torch.Generator().manual_seed(width)).to(device)
    cache = method.new_cache(model, max_length=width)
    torch.cuda.synchronize()
    started = time.perf_counter()
    mean = float(decode_nll(model, cache, ids, 1, chunk=chunk).mean()) / (width - 1)
    return time.perf_counter() - started, mean, cache.path


def step_seconds(
    model: Any, setting: str, rows: int, place: int, steps: int, device: torch.device, compile: bool
) -> Any:
    """Return the seconds of a captured step after `place` tokens, its likelihood per token, and the attention path."""
    method = parse_setting(setting).load()
    width = place + 2 * steps
    ids = torch.randint(3, 32000, (rows, width), generator=torch.Generator().manual_seed(width)).to(device)
    cache = method.new_cache(model, max_length=width)
    with torch.inference_mode():
        prefill(model, cache, ids[:, :place], None)
        lengths = torch.full((rows,), place, device=device)
        step = Forced(model, cache, ids, [place] * rows, lengths)
        captured = Captured(step, compile=compile)
        captured.first()
        for number in range(2 * steps - 2):
            if number:
                captured.next()
            if number == steps - 1:
                torch.cuda.synchronize()
                started = time.perf_counter()
            captured.replay()
        torch.cuda.synchronize()
    taken = (time.perf_counter() - started) / (steps - 1)
    return taken, float(step.total.mean()) / (2 * steps - 2), cache.path


def points(args: argparse.Namespace, model: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the figures of each setting."""
    windows = args.tokens // args.window
    for setting in args.settings:
        name = setting.partition(":")[0]
        torch.cuda.reset_peak_memory_stats()
        point: dict[str, Any] = {"setting": setting, "window": args.window, "extrapolated": True}
        if name not in STEPPED:
            chunk = args.chunk or "auto"
            seconds(model, setting, args.rows, 700, device, chunk)
            taken, mean, path = seconds(model, setting, args.rows, args.window, device, chunk)
            per = taken / args.rows
            point |= {"rows": args.rows, "measured_windows": args.rows, "batch_s": taken}
        else:
            parts = {}
            for place in args.places:
                how = (place, args.steps, device, args.compile)
                parts[place], mean, path = step_seconds(model, setting, args.stepped_rows, *how)
            # the time of a step grows up to the last of the places, from which on it is taken as constant
            first, last = parts[args.places[0]], parts[args.places[-1]]
            grown = min(args.places[-1], args.window)
            per = (grown * (first + last) / 2 + (args.window - grown) * last) / args.stepped_rows
            point |= {"rows": args.stepped_rows, "step_s": parts, "measured_windows": 0, "compiled": args.compile}
        point |= {
            "s_per_window": per,
            "wikitext2_windows": windows,
            "wikitext2_s": per * windows,
            "nll_per_token": mean,
            "path": path,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        yield point


def main() -> None:
    """Measure every setting, and write the JSON file after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--stepped-rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--places", type=int, nargs="+", default=[64, 2100])
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda:0")
    model = random_model(llama2_7b(args.layers), torch.bfloat16, device, 0)
    done: list[dict[str, Any]] = []
    for point in points(args, model, device):
        done.append(point)
        print(json.dumps(point), flush=True)
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "model": "llama2-7b, random weights",
        }
        args.out.write_text(json.dumps({**about, "tokens": args.tokens, "points": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
