"""``python -m experiments.quantspec.equality``: greedy speculation against the target alone, token for token, in fp32.

The target is replayed one token at a time and flushed exactly when the speculative run was flushed. Prompts end a few
tokens before a flush is due, so that every answer passes one. Half of them are books, half tasks of mini (all are
Python's texts where ``KVBENCH_DATA`` names no books). Where two tokens' logits differ by less than 1e-4, fp32 does not
decide between them; such places are listed. 1 where any run differs at another place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.measured import command_line, parted
from experiments.place import choice, place_result, stored_counts
from experiments.prompts import Prompt, books, loaded, tasks
from experiments.quantspec.table import equality_figures, equality_text
from experiments.stored import as_json
from kvbench.cache import KVCache
from kvbench.config.run_config import RuntimeConfig
from kvbench.decoding import Sampling
from kvbench.decoding.passes import prefill
from kvbench.decoding.round_times import Round, row_totals
from kvbench.decoding.sampling import Stopping
from kvbench.decoding.speculative import replay, speculative_decode
from kvbench.methods import load_method
from kvbench.methods.speculation import Speculation, Weights

#: a smaller difference between the two best logits is a tie in fp32
TIE = 1e-4


class EqualitySetup:
    """The bundled model in fp32 and the method.

    Args:
        device: device to load the model on.
        group: tokens of a group of keys.
        weights: weights of the draft.
    """

    def __init__(self, device: str, group: int, weights: Weights) -> None:
        held = loaded("tiny", RuntimeConfig(device=device), dtype="float32", max_length=4096)
        self.model, self.tokenizer, self.device = held.model, held.tokenizer, held.device
        form = {"bits": 8, "kind": "hierarchical"}
        key = {**form, "group_size": group, "axis": "channel"}
        value = {**form, "group_size": "head_dim", "axis": "token"}
        self.group, self.weights = group, weights
        self.method = load_method("quantspec", quantizer={"key": key, "value": value})

    def speculate(self, cache: KVCache, first: torch.Tensor, gamma: int, tokens: int) -> tuple[list[int], list[Round]]:
        """Return tokens and rounds of one answer from the cache after the prompt."""
        stopping = Stopping(1, (), (), None)
        sampling = Sampling()
        speculation = Speculation(gamma=gamma, weights=self.weights)
        rounds = speculative_decode(
            self.model, cache, first, stopping, sampling, sampling.generators(1), tokens, 0, speculation
        )
        return stopping.tokens[0], rounds


def flushes(rounds: Sequence[Round], prompt: int, group: int, border: int) -> tuple[int, ...]:
    """Return the points at which a run settled and flushed something."""
    packed, points = border, []
    for round_ in rounds:
        while round_.settled[0] - packed >= 2 * group:
            packed += group
            points.append(round_.settled[0])
    return tuple(points)


def compare_gammas(setup: EqualitySetup, prompt: Prompt, gammas: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """Return one record per gamma."""
    ids = torch.tensor([prompt.ids], device=setup.device)
    cache = setup.method.new_cache(setup.model, max_length=ids.shape[1] + tokens)
    with torch.inference_mode():
        first = prefill(setup.model, cache, ids, None).argmax(-1)
    border = setup.method.border(ids.shape[1])  # type: ignore[attr-defined]
    replayed: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    records = []
    for gamma in gammas:
        generated, rounds = setup.speculate(cache.clone(), first, gamma, tokens)
        points = flushes(rounds, ids.shape[1], setup.group, border)
        if points not in replayed:
            fresh = setup.method.new_cache(setup.model, max_length=ids.shape[1] + tokens)
            replayed[points] = replay(setup.model, fresh, ids, set(points), tokens)
        alone, gaps = replayed[points]
        differs = parted(generated, alone)
        records.append(
            {
                "prompt": prompt.id,
                "length": ids.shape[1],
                "gamma": gamma,
                "equal": differs is None,
                "differs_at": differs,
                "gap_there": None if differs is None else gaps[differs],
                "smallest_gap": min(gaps),
                "ties": [[i, gap] for i, gap in enumerate(gaps) if gap < TIE],
                "flushes": list(points),
                **row_totals(rounds, 0),
            }
        )
    return records


def lengths(group: int, count: int) -> list[int]:
    """Return prompt lengths whose next flush is 3 to 16 tokens away, on 3 or 4 groups."""
    return [group * (3 + i % 2) - 3 - (i * 5) % 14 for i in range(count)]


def main() -> int:
    """Compare; 0 where nothing but ties differs."""
    parser = command_line("experiments.quantspec.equality", __doc__, "results/quantspec", "", "cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=20, help="new tokens per prompt")
    parser.add_argument("--gammas", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--group", type=int, default=128, help="group size G, which is half of the buffer")
    parser.add_argument(
        "--weights", default="int4_all", choices=("same", "int4", "int4_all"), help="weights of the draft"
    )
    records_of = "folder for equality.json, which has one record per run"
    parser.add_argument("--runs", type=Path, default=Path("results/runs/quantspec"), help=records_of)
    arguments = parser.parse_args()
    setup = EqualitySetup(arguments.device, arguments.group, arguments.weights)
    wanted = lengths(arguments.group, arguments.prompts)
    records: list[dict[str, Any]] = []
    started = time.perf_counter()
    half = arguments.prompts // 2
    pool = [*books(setup.tokenizer, max(wanted) + 1, arguments.prompts - half), *tasks(setup.tokenizer, 1024, half)]
    for prompt, length in zip(pool, wanted, strict=True):
        # the last tokens of a task's prompt hold its question
        cut = prompt.ids[:length] if not prompt.stop else (prompt.ids[0], *prompt.ids[1 - length :])
        records += compare_gammas(setup, Prompt(prompt.id, cut, None, "", False), arguments.gammas, arguments.tokens)
        print(f"{len(records)} runs, {sum(r['equal'] for r in records)} equal", end="\r", flush=True)
    content = equality_figures(records, TIE)
    runs, old = arguments.runs, stored_counts(arguments.out / "equality.json", prompts_by_gamma)
    where = place_result(arguments.out, choice(arguments), prompts_by_gamma(content), old)
    out = where.path
    for folder in (out, runs):
        folder.mkdir(parents=True, exist_ok=True)
    head = [
        "# Greedy speculation against the target alone",
        "",
        f"Bundled model, fp32, {arguments.device}; QuantSpec with G = {arguments.group}, upper nibbles as the draft, "
        f"its weights: {arguments.weights}; {arguments.prompts} prompts of {min(wanted)} to {max(wanted)} tokens (half "
        f"books, half tasks of mini, all cut 3 to 16 tokens before a flush), {arguments.tokens} new ones each; the "
        "target replayed one token a step with the recorded flush points.",
        "",
    ]
    body = "\n".join([*head, *equality_text(content), ""])
    (out / "equality.md").write_text(body, encoding="utf-8")
    (out / "equality.json").write_text(as_json(content), encoding="utf-8")
    (runs / "equality.json").write_text(json.dumps(records, indent=0) + "\n", encoding="utf-8")
    print(f"\n{body}\n{time.perf_counter() - started:.0f} s")
    status = where.say()
    return status if all(r["equal"] or r["gap_there"] < TIE for r in records) else 1


def prompts_by_gamma(content: dict[str, Any]) -> dict[str, int]:
    """Return the number of prompts of each gamma."""
    return {f"gamma {row['gamma']}": int(row["prompts"]) for row in content["rows"]}


if __name__ == "__main__":
    raise SystemExit(main())
