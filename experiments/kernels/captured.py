"""``python -m experiments.kernels.captured``: do captured decode steps say what eager ones say, token for token?

The prompts of mini are prefilled once a method; copies of the cache are continued greedily by eager steps and by a
captured one, both with the same kernel. ``stock`` continues once more as an eager run does by itself (torch's SDPA
where nothing is packed) and ``compiled`` with the layers around attention compiled: where these part from the eager
tokens, the gap between the two best logits at that token tells whether it was a near tie.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from experiments.kernels.greedy import load
from experiments.place import add_options, choice, known, place
from experiments.place import rows as counted
from experiments.quantspec.prompts import Prompt, tasks
from kvbench.bench import report
from kvbench.cache import KVCache, Prompts
from kvbench.cache.options import Options
from kvbench.config.setting import parse
from kvbench.decoding import graphs, recordable
from kvbench.decoding.autoregressive import capture
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.stopping import Stopping

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


def eager(model: Any, cache: KVCache, token: torch.Tensor, length: int, count: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens after `token`, and the gap between the two best logits at each."""
    tokens, gaps = [int(token)], [0.0]
    for number in range(count - 1):
        positions = torch.tensor([[length + number]], device=token.device)
        logits = forward(model, cache, token[:, None], None, positions)[:, -1]
        two = logits.float().topk(2).values[0]
        token = logits.argmax(-1)
        tokens.append(int(token))
        gaps.append(float(two[0] - two[1]))
    return tokens, gaps


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
    graphs.decode(graph, token, stopping, count)
    return stopping.tokens[0], "graph"


def parted(left: list[int], right: list[int]) -> int | None:
    """Return the first position at which two continuations differ."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


@torch.inference_mode()
def compare(model: Any, tokenizer: Any, prompt: Prompt, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the ways for one prompt."""
    method = parse(METHODS[name]).load()
    ids, count = torch.tensor([prompt.ids], device=model.device), arguments.tokens
    spans = [prompt.span] if prompt.span else None
    prompts = Prompts.from_batch(ids, None, context_spans=spans, queries=[prompt.query], decode=tokenizer.decode)
    cache = method.new_cache(model, prompts, max_length=len(prompt.ids) + count)
    length = len(prompt.ids)
    token = prefill(model, cache, ids, None).argmax(-1)
    row: dict[str, Any] = {"id": prompt.id, "method": name, "tokens": count, "prompt": length}
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


def main() -> None:
    """Compare, print a line a method and write everything."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels.captured", description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--kernels", default="cuda", choices=["cuda", "triton"], help="kernels of eager and captured steps"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--compile", action="store_true", help="compile the layers around attention in captured steps")
    parser.add_argument("--out", default="results/h200/captured.json")
    add_options(parser)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, arguments.device)
    rows = []
    for name in arguments.methods:
        mine = [
            compare(model, tokenizer, prompt, name, arguments)
            for prompt in tasks(tokenizer, arguments.length, arguments.prompts)
        ]
        rows += mine
        if "parted_at" not in mine[0]:
            print(f"{name}: {mine[0]['how']}", flush=True)
            continue
        same = sum(row["parted_at"] is None and row["same_bill"] for row in mine)
        rest = {key: [row[key] for row in mine] for key in ("stock", "compiled") if key in mine[0]}
        print(f"{name} ({mine[0]['captured_path']}): {same} of {len(mine)} captured = eager; {rest}", flush=True)
    content = {**vars(arguments), **report.machine(), "rows": rows}
    out = Path(arguments.out)
    where = place(out, choice(arguments), counted(content), known(out, counted))
    report.write(where.path, content)
    where.say()


if __name__ == "__main__":
    main()
