"""Accuracy cost of quantizing the prompt's keys and values, by task, on the bundled model, without packed caches.

    python -m experiments.tiny.sensitivity kvbench/models/tiny --out results/tiny/sensitivity.json

The prompt is prefilled exactly; its keys (after RoPE) and values are quantized and decoded again by kvbench's own
quantizers, where the method would quantize them; the answer is then read by teacher forcing with its own keys and
values exact. All variants see the same samples, so differences to fp16 are paired. The tables of kvbench itself, with
packed caches and greedy decoding, are the ones to quote.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.measured import command_line
from experiments.place import choice, place_result, stored_counts
from experiments.stored import as_json
from experiments.tiny.evaluate import load_checkpoint, mean_with_error
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.tasks.mini import Mini
from kvbench.tasks.mini.task import TASKS

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

RESIDUAL = 128


def front(x: Tensor, tokens: int, quantizer: AffineQuantizer) -> Tensor:
    """Return `x` [B, H, T, D] with its first `tokens` tokens quantized and decoded."""
    if tokens <= 0:
        return x
    return torch.cat([quantizer.quantize(x[:, :, :tokens].contiguous()).dequantize(), x[:, :, tokens:]], 2)


def kivi(bits: int, key_axis: str = "channel") -> Change:
    """Quantize as KIVI with a residual of 128: keys in whole residuals, values but for the newest 128."""
    group = 32 if key_axis == "channel" else 64
    for_keys = AffineQuantizer(bits, group, key_axis)  # type: ignore[arg-type]
    for_values = AffineQuantizer(bits, group, "token")

    def change(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        n = keys.shape[2]
        exact = n % RESIDUAL if key_axis == "channel" else min(n, RESIDUAL)
        return front(keys, n - exact, for_keys), front(values, n - RESIDUAL, for_values)

    return change


def atom(bits: int) -> Change:
    """Quantize as Atom: every token, one group per head."""
    quantizer = AtomQuantizer(bits, 64, "token")

    def change(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return front(keys, keys.shape[2], quantizer), front(values, values.shape[2], quantizer)

    return change


VARIANTS: dict[str, Change | None] = {
    "fp16": None,
    "kivi int4": kivi(4),
    "kivi int3": kivi(3),
    "kivi int2": kivi(2),
    "kivi int2, keys per token": kivi(2, "token"),
    "atom int4": atom(4),
}


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, prompt: str, target: str) -> dict[str, tuple[bool, float, int]]:
    """Return by variant if the whole answer is the model's first choice, its NLL in nats, and its tokens."""
    from transformers import DynamicCache

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    answer = tokenizer(target, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    out = model(ids, use_cache=True, logits_to_keep=1)
    layers = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    scores = {}
    for name, change in VARIANTS.items():
        cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(*(change(keys, values) if change else (keys, values)), index)
        rest = model(answer[:, :-1], past_key_values=cache).logits[0]
        logits = torch.cat([out.logits[0], rest]).float()
        nll = torch.nn.functional.cross_entropy(logits, answer[0], reduction="sum")
        scores[name] = (bool((logits.argmax(-1) == answer[0]).all()), float(nll), answer.shape[1])
    return scores


def sensitivity_summary(results: list[dict[str, tuple[bool, float, int]]]) -> dict[str, Any]:
    """Return by variant exact match, its paired difference to fp16, and mean NLL per token."""
    entries: dict[str, Any] = {}
    for name in VARIANTS:
        entry = mean_with_error([float(result[name][0]) for result in results])
        entry["vs_fp16"] = mean_with_error([float(result[name][0]) - float(result["fp16"][0]) for result in results])
        entry["nll"] = round(sum(r[name][1] for r in results) / sum(r[name][2] for r in results), 5)
        entries[name] = entry
    return entries


def overall(tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the unweighted mean over the tasks and its standard error."""
    entries: dict[str, Any] = {}
    for name in VARIANTS:
        rows = [task[name] for task in tasks.values()]
        entries[name] = {
            "score": round(sum(r["score"] for r in rows) / len(rows), 4),
            "vs_fp16": round(sum(r["vs_fp16"]["score"] for r in rows) / len(rows), 4),
            "stderr": round(math.sqrt(sum(r["vs_fp16"]["stderr"] ** 2 for r in rows)) / len(rows), 4),
            "nll": round(sum(r["nll"] for r in rows) / len(rows), 5),
        }
    return entries


def main() -> None:
    """Measure and write JSON, task by task."""
    on = "cuda" if torch.cuda.device_count() else "cpu"
    parser = command_line("experiments.tiny.sensitivity", __doc__, None, "", on)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", nargs="*", default=[name for name in TASKS if name != "several"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=100)
    args = parser.parse_args()
    model, tokenizer = load_checkpoint(args.model, torch.device(args.device))
    task = Mini()
    tasks: dict[str, dict[str, Any]] = {}
    old = stored_counts(args.out, lambda kept: {name: entry["fp16"]["n"] for name, entry in kept["tasks"].items()})
    where = place_result(args.out, choice(args), dict.fromkeys(args.tasks, args.limit), old)
    where.path.parent.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        begin = time.perf_counter()
        samples = (task.sample(name, args.length, index) for index in range(args.limit))
        tasks[name] = sensitivity_summary([answers(model, tokenizer, s.prompt, s.continuation + "\n") for s in samples])
        result = {"length": args.length, "residual": RESIDUAL, "tasks": tasks, "mean": overall(tasks)}
        where.path.write_text(as_json(result))
        shown = " ".join(f"{100 * entry['score']:.0f}" for entry in tasks[name].values())
        print(f"{name} {shown} {time.perf_counter() - begin:.1f} s", flush=True)
    print(json.dumps(result["mean"]), flush=True)
    where.say()


if __name__ == "__main__":
    main()
