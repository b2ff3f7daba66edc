"""``python -m experiments.kernels.greedy``: do kernels change what a model says?

The prompts of mini are prefilled once a method; a copy of the cache is then continued greedily by the kernels and one
by the reference path. Where their tokens part, the gap between the reference path's two best logits at that token is
listed: kernels round differently, so they may decide a near tie the other way, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from experiments.measured import TINY, command_line, keep_json, parted
from experiments.prompts import Prompt, loaded, new_cache, tasks
from kvbench.bench import report
from kvbench.cache import KVCache
from kvbench.cache.progress import Options
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.decoding.passes import forward, prefill
from kvbench.errors import KvbenchError

METHODS: dict[str, str] = {
    "kivi int4": "kivi:int4",
    "kivi int2": "kivi:int2",
    "atom int4": "atom:int4_token",
    "logquant int2, W 64": "logquant:window=64",
    "partial_logquant int2, W 64": "partial_logquant:window=64",
    "cocktail": "cocktail:encoder=bm25",
    "quantspec": "quantspec:gamma=0",
}
Row = dict[str, Any]


def load_on_device(name: str, device: str) -> tuple[Any, Any]:
    """Return model and tokenizer on one device."""
    on_device = loaded(name, RuntimeConfig(device=device))
    return on_device.model, on_device.tokenizer


def eager(model: Any, cache: KVCache, token: torch.Tensor, length: int, count: int) -> tuple[list[int], list[float]]:
    """Return `token` and the greedy tokens after it, `count` in all, and the gap between the two best logits at each.

    The cache has the `length` tokens of the prompt; `token`, ``[1]``, was chosen after them, and its gap is given as 0.
    """
    tokens, gaps = [int(token)], [0.0]
    for number in range(count - 1):
        positions = torch.tensor([[length + number]], device=token.device)
        logits = forward(model, cache, token[:, None], None, positions)[:, -1]
        two = logits.float().topk(2).values[0]
        token = logits.argmax(-1)
        tokens.append(int(token))
        gaps.append(float(two[0] - two[1]))
    return tokens, gaps


@torch.inference_mode()
def compare_greedy(model: Any, tokenizer: Any, prompt: Prompt, name: str, arguments: argparse.Namespace) -> Row:
    """Continue one prompt twice; return the first token that differs and the reference path's gap there, or None."""
    method, count = parse_setting(METHODS[name]).load(), arguments.tokens
    cache, ids = new_cache(method, model, tokenizer, prompt, count)
    token = prefill(model, cache, ids, None).argmax(-1)
    continued = {}
    for options in (Options(kernels="reference"), Options(kernels="auto")):
        mine = cache.clone()
        mine.options = options
        tokens, gaps = eager(model, mine, token, len(prompt.ids), count + 1)
        continued[options.kernels] = (tokens[1:], gaps[1:], mine.path)
    method.detach(model)
    (expected, gaps, _), (kernel_tokens, _, path) = continued["reference"], continued["auto"]
    at = parted(expected, kernel_tokens)
    return {
        "id": prompt.id,
        "method": name,
        "path": path,
        "tokens": count,
        "parted_at": at,
        "gap": None if at is None else round(gaps[at], 5),
    }


def greedy_lines(name: str, mine: Sequence[Row]) -> list[str]:
    """Return what is printed of one method: how many continuations are equal, and where the others part."""
    parts = [row for row in mine if row["parted_at"] is not None]
    equal = f"{name} ({mine[0]['path']}): {len(mine) - len(parts)} of {len(mine)} continuations equal"
    return [equal, *(f"  {row['id']}: token {row['parted_at']}, gap {row['gap']}" for row in parts)]


def continuation_parser(
    command: str, about: str | None, length: int, prompts: int, tokens: int, out: str
) -> argparse.ArgumentParser:
    """Return a parser with the options of a comparison of continuations, and their defaults."""
    top = command_line(command, about, out, TINY, "cuda")
    add, default = top.add_argument, " (default: %(default)s)"
    add("--length", type=int, default=length, help="tokens of a prompt" + default)
    add("--prompts", type=int, default=prompts, help="prompts of each method" + default)
    add("--tokens", type=int, default=tokens, help="tokens of a continuation" + default)
    return top


def compare_continuations(
    arguments: argparse.Namespace,
    methods: Iterable[str],
    one: Callable[[Any, Any, Prompt, str, argparse.Namespace], Row],
    shown: Callable[[str, Sequence[Row]], list[str]],
) -> int:
    """Compare with `one` the continuations of all prompts by all methods, print each with `shown`, write the file."""
    model, tokenizer = load_on_device(arguments.model, arguments.device)
    prompts, rows, failed = tasks(tokenizer, arguments.length, arguments.prompts), [], 0
    for name in methods:
        try:
            mine = [one(model, tokenizer, prompt, name, arguments) for prompt in prompts]
        except (KvbenchError, ImportError) as error:  # a package that this machine lacks
            print(f"{name}: skipped: {error}", file=sys.stderr, flush=True)
            failed = 1
            continue
        rows += mine
        print("\n".join(shown(name, mine)), flush=True)
    return (
        keep_json({**vars(arguments), "out": str(arguments.out), **report.machine(), "rows": rows}, arguments) or failed
    )


def main() -> int:
    """Compare, print a line a method and write everything."""
    top = continuation_parser("experiments.kernels.greedy", __doc__, 4096, 50, 24, "results/h200/greedy.json")
    return compare_continuations(top.parse_args(), METHODS, compare_greedy, greedy_lines)


if __name__ == "__main__":
    sys.exit(main())
