"""``python -m experiments.kernels.greedy``: do kernels change what a model says?

The prompts of mini are prefilled once a method; a copy of the cache is then continued greedily by the kernels and one
by the reference path. Where their tokens part, the gap between the reference path's two best logits at that token is
listed: kernels round differently, so they may decide a near tie the other way, and nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from experiments.place import add_options, choice, known, place
from experiments.place import rows as counted
from experiments.quantspec.prompts import Prompt, tasks
from kvbench.bench import report
from kvbench.cache import Prompts
from kvbench.cache.options import Options
from kvbench.config.setting import parse

METHODS: dict[str, str] = {
    "kivi int4": "kivi:int4",
    "kivi int2": "kivi:int2",
    "atom int4": "atom:int4_token",
    "logquant int2, W 64": "logquant:window=64",
    "partial_logquant int2, W 64": "partial_logquant:window=64",
    "cocktail": "cocktail:encoder=bm25",
    "quantspec": "quantspec:gamma=0",
}


def load(name: str, device: str) -> tuple[Any, Any]:
    """Load model and tokenizer of ``conf/model``."""
    import yaml

    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.load import load as load_model
    from kvbench.models.spec import ModelConfig
    from kvbench.util.confdir import conf_dir

    data = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    data.pop("_target_", None)
    loaded = load_model(ModelConfig(**data), RuntimeConfig(device=device))
    return loaded.model, loaded.tokenizer


@torch.no_grad()
def compare(model: Any, tokenizer: Any, prompt: Prompt, name: str, count: int) -> dict[str, Any]:
    """Continue one prompt twice; return the first token that differs and the reference path's gap there, or None."""
    method = parse(METHODS[name]).load()
    ids = torch.tensor([prompt.ids], device=model.device)
    spans = [prompt.span] if prompt.span else None
    prompts = Prompts.from_batch(ids, None, context_spans=spans, queries=[prompt.query], decode=tokenizer.decode)
    cache = method.new_cache(model, prompts, max_length=len(prompt.ids) + count)
    first = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]
    runs = {}
    for kernels in ("reference", "auto"):
        mine, token, tokens, gaps = cache.clone(), first, [], []
        mine.options = Options(kernels=kernels)  # type: ignore[arg-type]
        for _ in range(count):
            logits = model(token, past_key_values=mine, use_cache=True).logits[:, -1].float()
            two = logits.topk(2).values[0]
            token = logits.argmax(-1)[:, None]
            tokens.append(int(token))
            gaps.append(float(two[0] - two[1]))
        runs[kernels] = (tokens, gaps, mine.path)
    method.detach(model)
    (expected, gaps, _), (kernel_tokens, _, path) = runs["reference"], runs["auto"]
    parted = next((i for i, (a, b) in enumerate(zip(expected, kernel_tokens, strict=True)) if a != b), None)
    return {
        "id": prompt.id,
        "method": name,
        "path": path,
        "tokens": count,
        "parted_at": parted,
        "gap": None if parted is None else round(gaps[parted], 5),
    }


def main() -> None:
    """Compare, print a line a method and write everything."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels.greedy", description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", default="results/h200/greedy.json")
    add_options(parser)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, arguments.device)
    rows = []
    for name in METHODS:
        mine = [
            compare(model, tokenizer, prompt, name, arguments.tokens)
            for prompt in tasks(tokenizer, arguments.length, arguments.prompts)
        ]
        rows += mine
        parted = [row for row in mine if row["parted_at"] is not None]
        print(f"{name} ({mine[0]['path']}): {len(mine) - len(parted)} of {len(mine)} continuations equal", flush=True)
        for row in parted:
            print(f"  {row['id']}: token {row['parted_at']}, gap {row['gap']}", flush=True)
    content = {**vars(arguments), **report.machine(), "rows": rows}
    out = Path(arguments.out)
    where = place(out, choice(arguments), counted(content), known(out, counted))
    report.write(where.path, content)
    where.say()


if __name__ == "__main__":
    main()
