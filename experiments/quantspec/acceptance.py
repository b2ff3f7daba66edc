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

from experiments.place import add_options, choice, place_result, stored_counts
from experiments.quantspec.prompts import Prompt, books, tasks
from experiments.quantspec.table import fold_speculation
from kvbench.cache import Prompts
from kvbench.decoding import Sampling
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.passes import prefill
from kvbench.decoding.round_times import row_totals
from kvbench.decoding.sampling import Stopping, choose
from kvbench.decoding.speculative import speculative_decode
from kvbench.methods import load_method
from kvbench.methods.speculation import Speculation


@dataclass(frozen=True)
class Draft:
    """A row of the tables; `options` are hyper-parameters of ``method=quantspec``."""

    name: str
    options: dict[str, Any]


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


class AcceptanceSetup:
    """A model of ``conf/model``.

    Args:
        name: key of ``conf/model``.
        device: device to load the model on.
        dtype: dtype of its weights.
    """

    def __init__(self, name: str, device: str, dtype: str) -> None:
        import yaml

        from kvbench.config.run_config import RuntimeConfig
        from kvbench.models.load import load_model
        from kvbench.models.spec import ModelConfig
        from kvbench.util.confdir import conf_dir
        from kvbench.util.schema import build

        data = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
        loaded: Any = load_model(build(ModelConfig, {**data, "dtype": dtype}, "model"), RuntimeConfig(device=device))
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, loaded.device
        self.ends = loaded.eos_token_ids

    @torch.inference_mode()
    def run(
        self, draft: Draft, prompt: Prompt, gammas: Sequence[int], tokens: int, temperature: float
    ) -> list[dict[str, Any]]:
        """Return one record per gamma."""
        method = load_method("quantspec", gamma=max(gammas), **draft.options)
        speculation = method.speculation
        assert speculation is not None
        prepare_draft(self.model, speculation)
        ids = torch.tensor([prompt.ids], device=self.device)
        prompts = Prompts.from_batch(
            ids, context_spans=[prompt.span], queries=[prompt.query], decode=self.tokenizer.decode
        )
        cache = method.new_cache(self.model, prompts, max_length=ids.shape[1] + tokens)
        logits = prefill(self.model, cache, ids, None)
        records = []
        for gamma in gammas:
            sampling = Sampling(temperature, seed=0)
            generators = sampling.generators(1)
            first = choose(logits, sampling, generators)
            stop = ("\n",) if prompt.stop else ()
            stopping = Stopping(1, self.ends if prompt.stop else (), stop, self.tokenizer)
            twin, how = cache.clone(), Speculation(gamma=gamma, draft=speculation.draft, weights=speculation.weights)
            started = time.perf_counter()
            rounds = speculative_decode(self.model, twin, first, stopping, sampling, generators, tokens, 0, how)
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


def prompts_of(data: str, setup: AcceptanceSetup, length: int, count: int) -> list[Prompt]:
    """Return the prompts of a data set by name."""
    return (tasks if data == "mini" else books)(setup.tokenizer, length, count)


def main() -> int:
    """Run what is missing and fold."""
    parser = argparse.ArgumentParser(prog="python -m experiments.quantspec.acceptance", description=__doc__)
    parser.add_argument("--model", default="tiny", help="a preset of conf/model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", nargs="+", default=["books", "mini"], choices=("books", "mini"))
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
    parser.add_argument("--runs", default="results/runs/quantspec", help="folder for the answers")
    parser.add_argument("--out", default="results/quantspec", help="folder for the tables")
    parser.add_argument("--fold-only", action="store_true")
    add_options(parser)
    arguments = parser.parse_args()
    runs = Path(arguments.runs)
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / f"acceptance-{arguments.model}-{arguments.dtype}-t{arguments.temperature:g}.jsonl"
    if not arguments.fold_only:
        _measure_acceptance(arguments, path)
    drafts = [draft.name for draft in DRAFTS]
    where = f"{arguments.model}, {arguments.dtype}, " + (
        "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    )
    wanted = Path(arguments.out)
    old = stored_counts(wanted / f"{path.stem}.json", prompts_by_cell)
    text, table = fold_speculation(path, drafts, where)
    target = place_result(wanted, choice(arguments), prompts_by_cell(table), old)
    target.path.mkdir(parents=True, exist_ok=True)
    (target.path / f"{path.stem}.md").write_text(text, encoding="utf-8")
    (target.path / f"{path.stem}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(text)
    return target.say()


def prompts_by_cell(table: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the number of prompts of each draft and gamma."""
    return {f"{c['data']}@{c['length']}, {c['draft']}, gamma {c['gamma']}": int(c["prompts"]) for c in table}


def _measure_acceptance(arguments: argparse.Namespace, path: Path) -> None:
    setup = AcceptanceSetup(arguments.model, arguments.device, arguments.dtype)
    have = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {(r["data"], r["nominal"], r["draft"], r["gamma"], r["prompt"]) for r in have}
    wanted = [d for d in DRAFTS if not arguments.drafts or any(d.name.startswith(n) for n in arguments.drafts)]
    with path.open("a", encoding="utf-8") as out:
        for length in arguments.lengths:
            pools = {data: prompts_of(data, setup, length, arguments.prompts) for data in arguments.data}
            for number in range(arguments.prompts):  # prompt by prompt, so that what is there is balanced
                for data, pool in pools.items():
                    prompt = pool[number]
                    for draft in wanted:
                        key = (data, length, draft.name)
                        gammas = [g for g in arguments.gammas if (*key, g, prompt.id) not in done]
                        if not gammas:
                            continue
                        for record in setup.run(draft, prompt, gammas, arguments.tokens, arguments.temperature):
                            out.write(json.dumps({"data": data, "nominal": length, **record}) + "\n")
                        out.flush()
                    print(f"{data}@{length}: {number + 1}/{len(pool)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
