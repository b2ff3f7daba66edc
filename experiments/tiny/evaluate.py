"""Scores of a model on `mini` by task and length, and bits per character on books.

    python -m experiments.tiny.evaluate kvbench/models/tiny --out results/tiny/scores.json

Exact match is taken by teacher forcing: a sample counts where every token of the answer and the line break after it is
the model's first choice, which is when greedy decoding gives exactly the answer. Tasks whose score is more lenient
(multi_value: recall; arithmetic: the final number) are decoded greedily. `nll` is the mean negative log-likelihood of
the answers' tokens in nats.
"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.measured import command_line, keep_json
from kvbench.tasks.base import Sample
from kvbench.tasks.mini import Mini
from kvbench.tasks.mini.task import TASKS
from kvbench.tasks.work import AskQuestions

Row = tuple[str, str]  # prompt and its exact continuation, line break included


def load_checkpoint(path: Path, device: torch.device) -> tuple[Any, Any]:
    """Load model (in fp32) and tokenizer as transformers loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def rows_of(sample: Sample) -> list[Row]:
    """Return the rows of one sample: one, or one for each of its questions."""
    if not isinstance(sample.work, AskQuestions):
        return [(sample.prompt, sample.continuation + "\n")]
    shared = sample.prompt[: sample.work.shared]
    return [(shared + question.prompt, question.continuation + "\n") for question in sample.work.questions]


@torch.inference_mode()
def forced(model: Any, tokenizer: Any, rows: Sequence[Row], tokens: int = 65536) -> list[tuple[bool, float, int]]:
    """Score by teacher forcing, in batches of about `tokens` tokens.

    Returns:
        for each row: whether every token is the first choice, the sum of their NLL in nats, their number.
    """
    encoded = [(tokenizer(p)["input_ids"], tokenizer(a, add_special_tokens=False)["input_ids"]) for p, a in rows]
    scores: list[tuple[bool, float, int]] = []
    size = max(1, tokens // max(len(p) + len(a) for p, a in encoded))
    for start in range(0, len(encoded), size):
        batch = encoded[start : start + size]
        width = max(len(p) + len(a) for p, a in batch)
        # padding on the right is never attended to under a causal mask
        ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in batch], device=model.device)
        hidden: Tensor = model.model(ids, use_cache=False).last_hidden_state
        for row, (prompt, answer) in enumerate(batch):
            logits = model.lm_head(hidden[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)]).float()
            wanted = torch.tensor(answer, device=model.device)
            nll = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
            scores.append((bool((logits.argmax(-1) == wanted).all()), float(nll), len(answer)))
    return scores


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, samples: Sequence[Sample], size: int = 25) -> list[str]:
    """Return greedy answers up to the first line break."""
    tokenizer.padding_side = "left"
    answers: list[str] = []
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        encoded = tokenizer([s.prompt for s in batch], return_tensors="pt", padding=True).to(model.device)
        encoded.pop("token_type_ids", None)
        out = model.generate(
            **encoded,
            max_new_tokens=batch[0].max_new_tokens,
            do_sample=False,
            eos_token_id=[newline, tokenizer.eos_token_id],
            pad_token_id=tokenizer.pad_token_id,
        )
        new = out[:, encoded["input_ids"].shape[1] :]
        answers += [text.split("\n")[0] for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return answers


def mean_with_error(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, its standard error, and n."""
    n, average = len(values), sum(values) / len(values)
    spread = sum((v - average) ** 2 for v in values) / max(1, n - 1)
    return {"score": round(average, 4), "stderr": round(math.sqrt(spread / n), 4), "n": n}


def task_score_cell(
    model: Any, tokenizer: Any, task: Mini, samples: Sequence[Sample], generate: bool
) -> dict[str, Any]:
    """Return the score of one task at one length."""
    rows = [rows_of(sample) for sample in samples]
    results = forced(model, tokenizer, [row for group in rows for row in group])
    exact: list[float] = []
    everything: list[float] = []
    at = 0
    for group in rows:
        right = [float(result[0]) for result in results[at : at + len(group)]]
        at += len(group)
        exact.append(sum(right) / len(right))
        everything.append(float(all(right)))
    entry = mean_with_error(exact)
    entry["nll"] = round(sum(r[1] for r in results) / sum(r[2] for r in results), 5)
    entry["how"] = "forced"
    if len(rows[0]) > 1:
        entry["all"] = mean_with_error(everything)
    if generate:
        answers = greedy(model, tokenizer, samples)
        scores = [task.score(sample, text)["score"] for sample, text in zip(samples, answers, strict=True)]
        entry = {**entry, **mean_with_error(scores), "how": "greedy", "exact": mean_with_error(exact)}
    return entry


def books(model: Any, tokenizer: Any, paths: Sequence[Path], context: int, limit: int) -> dict[str, Any]:
    """Return bits per character over the first `limit` tokens of each book, in spans of `context` tokens with `<s>`."""
    by_book = {}
    total_nll, total_characters, total_tokens = 0.0, 0, 0
    for path in paths:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8")[: 8 * limit]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:limit]
        nll = 0.0
        for start in range(0, len(ids), context - 1):
            part = ids[start : start + context - 1]
            window = torch.tensor([[tokenizer.bos_token_id, *part]], device=model.device)
            with torch.inference_mode():
                logits = model(window, use_cache=False).logits[0, :-1].float()
            nll += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
        characters = len(tokenizer.decode(ids))
        by_book[path.name.split(".")[0]] = round(nll / math.log(2) / characters, 4)
        total_nll += nll
        total_characters += characters
        total_tokens += len(ids)
    return {
        "bits_per_character": round(total_nll / math.log(2) / total_characters, 4),
        "token_perplexity": round(math.exp(total_nll / total_tokens), 2),
        "context": context,
        "tokens": total_tokens,
        "books": by_book,
    }


def _samples(job: tuple[Mini, str, int]) -> list[Sample]:
    task, name, length = job
    return [task.sample(name, length, index) for index in range(task.limit)]


def main() -> int:
    """Evaluate a folder and write JSON."""
    on = "cuda" if torch.cuda.device_count() else "cpu"
    parser = command_line("experiments.tiny.evaluate", __doc__, None, "", on)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generate", choices=("needed", "all", "none"), default="needed")
    parser.add_argument(
        "--books", nargs="*", type=Path, default=[], help="folder of books on which bits per character are measured"
    )
    parser.add_argument("--book-tokens", type=int, default=16384)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    task = Mini(tasks=tuple(args.tasks), lengths=tuple(args.lengths), limit=args.limit, seed=args.seed)
    task.check()
    jobs = [(task, name, length) for name in args.tasks for length in args.lengths]
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:  # before anything touches a GPU
        data = pool.map(_samples, jobs, chunksize=1)
    model, tokenizer = load_checkpoint(args.model, torch.device(args.device))
    result: dict[str, Any] = {"mini": {"version": task.version, "seed": task.seed}, "scores": {}}
    for (_, name, length), samples in zip(jobs, data, strict=True):
        begin = time.perf_counter()
        wanted = args.generate == "all" or (args.generate == "needed" and TASKS[name].scorer in ("values", "number"))
        entry = task_score_cell(model, tokenizer, task, samples, wanted)
        result["scores"][f"{name}@{length}"] = entry
        print(f"{name}@{length}", json.dumps(entry), f"{time.perf_counter() - begin:.1f} s", flush=True)
    if args.books:
        result["books"] = books(model, tokenizer, args.books, 4096, args.book_tokens)
        print("books", json.dumps(result["books"]), flush=True)
    return keep_json(result, args, counts)


def counts(result: dict[str, Any]) -> dict[str, int]:
    """Return the samples of each task and length."""
    return {name: int(entry["n"]) for name, entry in result["scores"].items()}


if __name__ == "__main__":
    raise SystemExit(main())
