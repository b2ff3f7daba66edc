"""``python -m experiments.quantspec.acceptance``: how many drafts are accepted, by draft and gamma.

QuantSpec's claim (sec. 5.2, App. G, H) is that drafts on a quantized cache are accepted more often than drafts on a
sparse one, the more so the further they look ahead. Here the same prompts are continued by every draft with every
gamma. A prompt is prefilled once a draft and its cache copied for each gamma. Each answer is a line of a file that an
interrupted run takes up again; ``--fold-only`` makes the tables of what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.measured import TINY, command_line
from experiments.place import choice, place_result, stored_counts
from experiments.prompts import Prompt, books, loaded, new_cache, tasks
from experiments.quantspec.table import fold_speculation
from experiments.stored import as_json
from kvbench.config.run_config import RuntimeConfig
from kvbench.decoding import Sampling
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.passes import prefill
from kvbench.decoding.round_times import row_totals
from kvbench.decoding.sampling import Stopping, choose
from kvbench.decoding.speculative import speculative_decode
from kvbench.methods import load_method
from kvbench.methods.speculation import Speculation
from kvbench.models.load import LoadedModel


@dataclass(frozen=True)
class Draft:
    """A row of the tables; `options` are hyper-parameters of ``method=quantspec``."""

    name: str
    options: dict[str, Any]


#: data set -> its prompts
DATA = {"books": books, "mini": tasks}
#: sparse drafts verify against an fp16 target (MagicDec, the paper's baselines), and so do the other methods
DRAFTS = (
    Draft("quantspec, upper nibbles", {}),
    Draft("quantspec, upper nibbles, int4 weights", {"draft_weights": "int4"}),
    Draft("streamingllm, 1/4", {"draft": "streamingllm", "target": "fp16"}),
    Draft("snapkv, 1/4", {"draft": "snapkv", "target": "fp16"}),
    Draft("kivi 2-bit", {"draft": "kivi", "target": "fp16"}),
    Draft("logquant 2-bit", {"draft": "logquant", "target": "fp16"}),
    Draft("cocktail, bm25", {"draft": "cocktail", "target": "fp16", "draft_options": {"encoder": "bm25"}}),
)


@torch.inference_mode()
def answers(
    held: LoadedModel, draft: Draft, prompt: Prompt, gammas: Sequence[int], tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """Return one record per gamma."""
    method = load_method("quantspec", gamma=max(gammas), **draft.options)
    speculation = method.speculation
    assert speculation is not None
    prepare_draft(held.model, speculation)
    cache, ids = new_cache(method, held.model, held.tokenizer, prompt, tokens)
    logits = prefill(held.model, cache, ids, None)
    records = []
    for gamma in gammas:
        sampling = Sampling(temperature, seed=0)
        generators = sampling.generators(1)
        first = choose(logits, sampling, generators)
        stop = ("\n",) if prompt.stop else ()
        stopping = Stopping(1, held.eos_token_ids if prompt.stop else (), stop, held.tokenizer)
        twin, how = cache.clone(), Speculation(gamma=gamma, draft=speculation.draft, weights=speculation.weights)
        started = time.perf_counter()
        rounds = speculative_decode(held.model, twin, first, stopping, sampling, generators, tokens, 0, how)
        records.append(
            {
                "draft": draft.name,
                "gamma": gamma,
                "prompt": prompt.id,
                "length": ids.shape[1],
                "seconds": round(time.perf_counter() - started, 4),
                "answer": stopping.tokens[0],
                **row_totals(rounds, 0),
            }
        )
    return records


def main() -> int:
    """Run what is missing and fold."""
    parser = command_line("experiments.quantspec.acceptance", __doc__, "results/quantspec", TINY, "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=tuple(DATA))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="prompt lengths in tokens")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts per data set and length")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt (QuantSpec: 90)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument(
        "--drafts", nargs="*", default=[], help="drafts to measure: names or beginnings of names (default: all)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (0: greedy, as in the paper)"
    )
    parser.add_argument("--runs", type=Path, default=Path("results/runs/quantspec"), help="folder for the answers")
    parser.add_argument("--fold-only", action="store_true")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    path = arguments.runs / f"acceptance-{arguments.model}-{arguments.dtype}-t{arguments.temperature:g}.jsonl"
    if not arguments.fold_only:
        _measure_acceptance(arguments, path)
    sampling = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    where = f"{arguments.model}, {arguments.dtype}, {sampling}"
    text, table = fold_speculation(path, [draft.name for draft in DRAFTS], where)
    old = stored_counts(arguments.out / f"{path.stem}.json", prompts_by_cell)
    target = place_result(arguments.out, choice(arguments), prompts_by_cell(table), old)
    target.path.mkdir(parents=True, exist_ok=True)
    for name, content in ((f"{path.stem}.md", text), (f"{path.stem}.json", as_json(table))):
        (target.path / name).write_text(content, encoding="utf-8")
    print(text)
    return target.say()


def prompts_by_cell(table: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the number of prompts of each draft and gamma."""
    return {f"{c['data']}@{c['length']}, {c['draft']}, gamma {c['gamma']}": int(c["prompts"]) for c in table}


def _measure_acceptance(arguments: argparse.Namespace, path: Path) -> None:
    held = loaded(arguments.model, RuntimeConfig(device=arguments.device), dtype=arguments.dtype)
    have = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {(r["data"], r["nominal"], r["draft"], r["gamma"], r["prompt"]) for r in have}
    wanted = [d for d in DRAFTS if not arguments.drafts or any(d.name.startswith(n) for n in arguments.drafts)]
    with path.open("a", encoding="utf-8") as out:
        for length in arguments.lengths:
            pools = {data: DATA[data](held.tokenizer, length, arguments.prompts) for data in arguments.data}
            for number in range(arguments.prompts):  # prompt by prompt, so that what is there is balanced
                for data, pool in pools.items():
                    prompt = pool[number]
                    for draft in wanted:
                        key = (data, length, draft.name)
                        gammas = [g for g in arguments.gammas if (*key, g, prompt.id) not in done]
                        if not gammas:
                            continue
                        for record in answers(held, draft, prompt, gammas, arguments.tokens, arguments.temperature):
                            out.write(json.dumps({"data": data, "nominal": length, **record}) + "\n")
                        out.flush()
                    print(f"{data}@{length}: {number + 1}/{len(pool)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
