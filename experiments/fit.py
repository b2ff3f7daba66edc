"""Figures behind ``kvbench.fit``, folded from results: step times, KL divergences, and how far predictions are off.

python -m experiments.fit            # print the tables
python -m experiments.fit --write    # also kvbench/fit/measured.json, results/fit/README.md and docs/which-cache.md

The line for step times is fitted to the captured and compiled steps of results/h200 that a fused kernel served. Points
of results/h200/papers with several sequences are left out: they are older than the kernel for products of 2 to 16 rows.
Its error is that of models that were left out of the fit; the two with Llama-2-7B's shape count as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from experiments.checks.rules import Block, write_blocks
from experiments.stored import ROOT, content, load_result_json, markdown_table
from kvbench.fit import answer
from kvbench.fit.answer import StepTimes, Wish
from kvbench.fit.command import fit_rows
from kvbench.fit.engines import FORMATS
from kvbench.fit.model import FitModel, model_of, read_model
from kvbench.fit.show import answer_sentence, interval_text
from kvbench.profiling.roofline import KERNELS, gpu_named
from kvbench.util import atomic

GPU = "h200"
#: files of points, below results/h200
FILES = (
    "formats/tpot_7b", "formats/tpot_8b", "efficiency/llama2-7b", "efficiency/llama3.1-8b",
    "efficiency/llama3.1-8b_batches", "batch8/fp16_24k", "batch8/steps_more", "batch8/steps_last",
    "batch8/steps_last_more", "papers/cocktail_llama2-7b", "papers/cocktail_llama2-13b", "papers/cocktail_longchat-7b",
    "papers/cocktail_mistral-7b", "papers/cocktail_mistral-7b_kivi",
)  # fmt: skip
#: models with the same shape as another
SAME_SHAPE = {"longchat-7b": "llama2-7b"}
MEASURED = ROOT / "kvbench" / "fit" / "measured.json"
README, PAGE = "results/fit/README.md", "docs/which-cache.md"


@dataclass(frozen=True)
class StepPoint:
    """A measured step: model, setting, sequences, seconds, and the bytes of weights and cache that it reads."""

    model: str
    setting: str
    batch: int
    context: int
    seconds: float
    weights: float
    cached: float
    layers: int

    @property
    def shape(self) -> str:
        """Name of the model whose dimensions it has."""
        return SAME_SHAPE.get(self.model, self.model)

    def predicted(self, line: StepTimes) -> float:
        """Return the seconds that a line predicts for it."""
        packed = self.setting != "fp16"
        return line.seconds(gpu_named(GPU), self.layers, self.weights, self.cached, packed, self.batch)

    def error(self, line: StepTimes) -> float:
        """Return the relative error of a line's prediction."""
        return self.predicted(line) / self.seconds - 1


@cache
def step_points() -> tuple[StepPoint, ...]:
    """Return the points of all files."""
    return tuple(point for name in FILES for point in _points(name))


def _points(name: str) -> Iterator[StepPoint]:
    data = load_result_json(f"results/h200/{name}.json")
    model = read_model(data["model"])
    for row in data.get("rows") or data["points"]:
        stale = name.startswith("papers/") and row["batch"] > 1
        if row.get("status") != "ok" or row.get("stepping") != "graph, compiled" or stale:
            continue
        seconds, cached = row["tpot_s"], row["kv_used"]
        seconds = seconds["median"] if isinstance(seconds, dict) else seconds
        cached = cached["total"] if isinstance(cached, dict) else cached
        sizes = model.read_bytes(1), cached, model.layers
        yield StepPoint(data["model"], row["setting"], row["batch"], row["prompt"], seconds, *sizes)


def fitted(points: Sequence[StepPoint]) -> StepTimes:
    """Return the line with the least squared relative errors."""
    gpu, rows, rest = gpu_named(GPU), [], []
    for point in points:
        packed, micro = point.setting != "fp16", 1e-6 * point.layers
        read = point.cached / gpu.read
        terms = [read * (not packed), read * packed, micro * (not packed), micro * packed, micro * (point.batch > 1)]
        known = point.weights / gpu.read + point.layers * KERNELS * gpu.kernel_s
        rows.append([term / point.seconds for term in terms])
        rest.append(1 - known / point.seconds)
    exact, packed_factor, exact_us, packed_us, batch_us = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    factors = {"exact": float(exact), "packed": float(packed_factor)}
    return StepTimes(factors, {"exact": float(exact_us), "packed": float(packed_us)}, float(batch_us))


@cache
def left_out() -> Mapping[str, tuple[float, ...]]:
    """Return the errors at the points of each model, with a line fitted to the other models."""
    points = step_points()
    shapes = dict.fromkeys(point.shape for point in points)
    lines = {shape: fitted([point for point in points if point.shape != shape]) for shape in shapes}
    return {shape: tuple(p.error(lines[shape]) for p in points if p.shape == shape) for shape in shapes}


def logs() -> list[dict[str, Any]]:
    """Return vLLM's logs (results/fit/vllm.json), each with its model and what is predicted for it.

    ``ours``: tokens from the log's own bytes; ``alone``: from the card's memory, where the log tells how much may be
    used and what its profiled pass was.
    """
    data = load_result_json("results/fit/vllm.json")
    return [_log(row, model_of(row["model"], data["models"][row["model"]])) for row in data["logs"]]


def _log(row: Mapping[str, Any], model: FitModel) -> dict[str, Any]:
    per_token = model.cache_bytes(FORMATS[row["format"]].method, 1 << 16, row["gpus"]) / (1 << 16)
    alone = None
    if row["gpu"] and row["utilization"] and row.get("sequences"):
        wish = Wish(model, gpu_named(row["gpu"]), row["batched"], 1, row["gpus"], row["utilization"])
        peak = wish.profiled(row["batched"], row["sequences"])
        alone = wish.left(peak) / per_token
    return {**row, "ours": row["available"] * 2**30 / per_token, "alone": alone}


def cards() -> list[dict[str, Any]]:
    """Return the published times of other cards with the error of the prediction as ``error``."""
    data, models = load_result_json("results/fit/cards.json"), load_result_json("results/fit/vllm.json")["models"]
    line, rows = fitted(step_points()), []
    for row in data["points"]:
        size = row.get("weights_gib")
        model = model_of(row["model"], models[row["model"]], size) if row["model"] in models else None
        model = model or read_model(row["model"], None, size)
        form = FORMATS[row["format"]]
        cached = model.cache_bytes(form.method, row["context"])
        seconds = line.seconds(gpu_named(row["gpu"]), model.layers, model.read_bytes(1), cached, not form.exact, 1)
        rows.append({**row, "seconds": seconds, "error": seconds * row["tokens_per_s"] - 1})
    return rows


def measured() -> dict[str, Any]:
    """Return the content of ``kvbench/fit/measured.json``."""
    line, errors = fitted(step_points()), [error for mine in left_out().values() for error in mine]
    other = [row["error"] for row in cards()]
    figures = content(ROOT / "results" / "smollm2" / "kl" / "figures.json")
    data = next(iter(figures["data"]))
    lines = {}
    for one in figures["lines"]:
        run = one["runs"].get(data)
        if run is not None:
            kl = {"kl": run["kl"]["value"], "kl_low": run["kl"]["low"], "kl_high": run["kl"]["high"]}
            lines[one["name"]] = {**kl, "flips": run["flips"]["value"], "n": run["n"]}
    return {
        "tpot": {
            "gpu": GPU,
            "points": len(step_points()),
            "cache": {key: _round(value) for key, value in line.cache.items()},
            "layer_us": {key: _round(value) for key, value in line.layer.items()},
            "batch_us": _round(line.batch),
            "error": [_round(min(errors)), _round(max(errors))],
        },
        "elsewhere": {"points": len(other), "error": [_round(min(other)), _round(max(other))]},
        "fidelity": {"model": figures["model"], "data": data, "lines": dict(sorted(lines.items()))},
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def percent(value: float | None) -> str:
    """Return a relative error as text; a dash for None."""
    return "-" if value is None else f"{100 * value:+.1f} %"


def log_table() -> str:
    """Return the table of vLLM's logs: tokens printed, from its bytes, and from the card alone."""
    lines = []
    for row in logs():
        name = row["model"].partition("/")[2] + (f", {row['gpus']} GPUs" if row["gpus"] > 1 else "")
        alone = None if row["alone"] is None else row["alone"] / row["tokens"] - 1
        figures = f"{row['available']:.2f}", f"{row['tokens']:,}", percent(row["ours"] / row["tokens"] - 1)
        lines.append([name, row["format"], *figures, row["gpu"] or "-", percent(alone)])
    head = ("model", "cache", "GiB available", "tokens", "from these bytes", "card", "from the card alone")
    return "\n".join(markdown_table(head, lines))


def error_table() -> str:
    """Return the table of errors of step times: models left out, and other cards."""
    lines = [
        [f"{shape} left out, {GPU}", str(len(errors)), percent(min(errors)), percent(max(errors))]
        for shape, errors in left_out().items()
    ]
    rows = cards()
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        errors = tuple(row["error"] for row in rows if row["gpu"] == gpu)
        lines.append([f"{gpu}, published", str(len(errors)), percent(min(errors)), percent(max(errors))])
    return "\n".join(markdown_table(("points", "number", "lowest error", "highest error"), lines))


#: questions of the page: model, card, GPUs, context, sequences, weights
ASKED = (
    ("llama3.1-8b", "rtx4090", 1, 32768, 1, None),
    ("Qwen/Qwen3-14B", "rtx3090", 1, 32768, 1, "int4"),
    ("mistral-7b", "l4", 1, 16384, 4, "fp8"),
    ("llama3.1-8b", "h200", 1, 131072, 8, None),
    ("Qwen/Qwen3-235B-A22B-FP8", "h200", 4, 32768, 16, "fp8"),
    ("moonshotai/Kimi-K2-Thinking", "b200", 8, 131072, 8, "int4"),
)


def example_answers() -> str:
    """Return the sentence and the formats that matter for the models and cards of :data:`ASKED`."""
    models, lines = load_result_json("results/fit/vllm.json")["models"], []
    for name, gpu, gpus, context, batch, weights in ASKED:
        known = models.get(name)
        model = model_of(name, known, None, weights) if known else read_model(name, weights)
        wish = Wish(model, gpu_named(gpu), context, batch, gpus)
        rows, _ = fit_rows(wish)
        shown = [row for row in rows if row.format in ("fp16", "fp8", "q8_0", "int4_per_token_head")]
        lines += ["", f"> {answer_sentence(wish, rows)}", ""]
        lines += markdown_table(
            ("format", "longest context", "largest batch", "cache, GiB a GPU", "TPOT, ms", "interval", "rests on"),
            [
                [row.format, f"{row.longest_context:,}", f"{row.largest_batch:,}", f"{row.cache_bytes / 2**30:.2f}"]
                + [f"{1e3 * row.tpot_s:.3g}", interval_text(row), row.basis]
                for row in shown
            ],
        )
    return "\n".join(lines[1:])


def fit_blocks() -> list[Block]:
    """Return what is written into documents."""
    logs_of, points_of = "results/fit/vllm.json", "results/h200 and results/fit/cards.json"
    return [
        Block(README, log_table() + "\n", logs_of, "fit-logs"),
        Block(README, error_table() + "\n", points_of, "fit-errors"),
        Block(PAGE, error_table() + "\n", points_of, "fit-errors"),
        Block(PAGE, example_answers() + "\n", "kvbench/fit/measured.json", "fit-answers"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, with ``--write`` write them and the file of the package; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fit", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {MEASURED.relative_to(ROOT)} and the documents")
    arguments = parser.parse_args(argv)
    print(log_table(), error_table(), example_answers(), sep="\n\n")
    if not arguments.write:
        return 0
    atomic.replace_file(MEASURED, (json.dumps(measured(), indent=1) + "\n").encode())
    answer.measured.cache_clear()
    return write_blocks(fit_blocks())


if __name__ == "__main__":
    sys.exit(main())
