"""Time steps of a model whose layers have a sliding window, captured and eager, beside layers that see everything.

python results/h200/sliding/times.py OUT [--settings "kivi:int4_g128" fp16] [--window 4096] [--context 32768]

The model has the shape of Mistral 7B with random weights in bf16, and a cache of random keys and values. Milliseconds
are medians of the steps after the third, batch 1, not compiled. Results are written after each measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import MistralConfig

from kvbench.bench import report
from kvbench.config.setting import parse_setting
from kvbench.decoding.sampling import Sampling
from kvbench.measure.random_fill import go_on
from kvbench.parallel.spread import random_spread


def measured(model: Any, setting: str, window: int | None, context: int, graphs: Any, steps: int) -> dict[str, Any]:
    """Return figures of steps after `context` random tokens, with a sliding window of all layers or none."""
    model.config.sliding_window = window
    method = parse_setting(setting).load()
    cache = method.new_cache(model, None, max_length=context + steps + 16)
    generation = go_on(model, cache, 1, context, max_new_tokens=steps, sampling=Sampling(), graphs=graphs)
    method.detach(model)
    times = sorted(1e3 * second for second in generation.step_s[3:])
    return {
        "setting": setting,
        "window": window,
        "context": context,
        "median_ms": round(median(times), 3),
        "p90_ms": round(times[int(0.9 * len(times))], 3),
        "steps": len(times),
        "stepping": generation.stepping,
        "path": cache.path,
        "kv_bytes": cache.bill().used.total,
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file for the results")
    parser.add_argument("--settings", nargs="*", default=["kivi:int4_g128", "fp16"])
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    shape = MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
        sliding_window=args.window,
    )
    model = random_spread(shape, torch.bfloat16, [torch.device("cuda", 0)], 0)
    rows: list[dict[str, Any]] = []
    points = [
        (args.window, args.context, "always", 70),
        (None, args.window, "always", 70),
        (args.window, args.context, "never", 12),
        (None, args.context, "always", 70),
    ]
    for setting in args.settings:
        for point in points:
            rows.append(measured(model, setting, *point))
            print(rows[-1], flush=True)
            content = {"what": "steps with a sliding window", **report.machine(), "times": rows}
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
