"""``python -m experiments.kernels.captured``: do captured decode steps say what eager ones say, token for token?

The prompts of mini are prefilled once a method; copies of the cache are continued greedily by eager steps and by a
captured one, both with the same kernel. ``stock`` continues once more as an eager run does by itself (torch's SDPA
where nothing is packed) and ``compiled`` with the layers around attention compiled: where these part from the eager
tokens, the gap between the two best logits at that token tells whether it was a near tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from experiments.kernels.greedy import Row, compare_continuations, continuation_parser, eager
from experiments.measured import parted
from experiments.prompts import Prompt, new_cache
from kvbench.cache import KVCache
from kvbench.cache.progress import Options
from kvbench.config.setting import parse_setting
from kvbench.decoding import graphs, recordable
from kvbench.decoding.autoregressive import capture
from kvbench.decoding.passes import prefill
from kvbench.decoding.sampling import Sampling, Stopping

METHODS: dict[str, str] = {
    "fp16": "fp16",
    "kivi int4": "kivi:int4",
    "kivi int2": "kivi:int2",
    "kivi int2, 2 sinks, R 32": "kivi:int2:sinks=2:residual=32",
    "atom int4": "atom:int4_token",
    "logquant int2, W 64": "logquant:window=64",
    "partial_logquant int2, W 64": "partial_logquant:window=64",
    "cocktail": "cocktail:encoder=bm25",
    "cocktail 10/30/60": "cocktail:encoder=bm25:split=[10,30,60]",
    "quantspec, no draft": "quantspec:gamma=0",
    "streamingllm": "streamingllm:budget=512",
    "snapkv": "snapkv",
    "logquant int2, W 42": "logquant",
    "h2o": "h2o",
    "kvquant": "kvquant",
    "oscar": "oscar",
    "oscar, window 32": "oscar:sinks=4:window=32",
    "keep half, int4": "keep:int4:residual=32",
    "keep a quarter, int2": "keep:int2:keep=0.25",
}


def captured(
    model: Any, cache: KVCache, token: torch.Tensor, length: int, count: int, compile: bool
) -> tuple[list[int], str]:
    """Return the tokens of a captured step, and the way it ran."""
    stopping, sampling = Stopping(1, (), (), None), Sampling()
    lengths = torch.tensor([length], device=token.device)
    reason = recordable.eager_reason(model, cache, "always", count - 1, token.device)
    try:
        graph = None if reason else capture(model, cache, token, lengths, sampling, [], count - 1, compile)
    except recordable.NotCaptured as error:
        graph, reason = None, str(error)
    if graph is None:
        return [], f"eager ({reason})"
    graphs.decode_captured(graph, token, stopping, count)
    return stopping.tokens[0], "graph"


@torch.inference_mode()
def compare_captured(model: Any, tokenizer: Any, prompt: Prompt, name: str, arguments: argparse.Namespace) -> Row:
    """Compare the ways for one prompt."""
    method, count, length = parse_setting(METHODS[name]).load(), arguments.tokens, len(prompt.ids)
    cache, ids = new_cache(method, model, tokenizer, prompt, count)
    token = prefill(model, cache, ids, None).argmax(-1)
    row: Row = {"id": prompt.id, "method": name, "tokens": count, "prompt": length}
    cache.options = Options(kernels=arguments.kernels)
    twin = cache.clone()
    replayed, row["how"] = captured(model, twin, token, length, count, False)
    row["captured_path"], bill = twin.path, twin.bill().as_dict()
    if row["how"].startswith("graph"):
        twin = cache.clone()
        wanted, gaps = eager(model, twin, token, length, count)
        row |= {
            "path": twin.path,
            "parted_at": parted(wanted, replayed),
            "same_bill": twin.bill().as_dict() == bill,
        }
        others = (
            {"compiled": captured(model, cache.clone(), token, length, count, True)[0]} if arguments.compile else {}
        )
        cache.options = Options()
        others["stock"] = eager(model, cache.clone(), token, length, count)[0]
        for key, tokens in others.items():
            at = parted(wanted, tokens)
            row[key] = {"parted_at": at, "gap": None if at is None else round(gaps[at], 5)}
    method.detach(model)
    return row


def captured_lines(name: str, mine: Sequence[Row]) -> list[str]:
    """Return what is printed of one method: how many captured continuations are as eager ones, and the other ways."""
    if "parted_at" not in mine[0]:
        return [f"{name}: {mine[0]['how']}"]
    same = sum(row["parted_at"] is None and row["same_bill"] for row in mine)
    rest = {key: [row[key] for row in mine] for key in ("stock", "compiled") if key in mine[0]}
    return [f"{name} ({mine[0]['captured_path']}): {same} of {len(mine)} captured = eager; {rest}"]


def main() -> int:
    """Compare, print a line a method and write everything."""
    top = continuation_parser("experiments.kernels.captured", __doc__, 2048, 2, 512, "results/h200/captured.json")
    add = top.add_argument
    add("--kernels", default="cuda", choices=["cuda", "triton"], help="kernels of eager and captured steps")
    add("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    add("--compile", action="store_true", help="compile the layers around attention in captured steps")
    arguments = top.parse_args()
    return compare_continuations(arguments, arguments.methods, compare_captured, captured_lines)


if __name__ == "__main__":
    sys.exit(main())
