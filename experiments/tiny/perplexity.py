"""Perplexity of tiny under its cache methods, and QuantSpec's Table 3: keys grouped by channel or token, values too.

    python -m experiments.tiny.perplexity --wikitext2 FILE --books FOLDER

runs what is missing of every cell (WikiText-2 and books, 16 windows of 512 tokens each) and writes perplexity.json. The
tables of results/tiny/perplexity.md are made of it by ``python -m experiments --check --write``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.measured import command_line
from experiments.place import choice, place_result
from experiments.stored import as_json, grid

#: the texts and their overrides
TEXTS = {
    "wikitext2": ("dataset=perplexity/wikitext2", "dataset.window=512", "dataset.limit=16"),
    "books": ("dataset=perplexity/pg19", "dataset.window=512", "dataset.per_document=1"),
}
#: rows of the first table: label and setting
DECODE = {
    "fp16": "fp16",
    "logquant int2_g64": "logquant",
    "partial_logquant int2_g64": "partial_logquant",
    "kivi int2": "kivi",
    "atom int4_token": "atom",
    "hf_quantized 2 bits (hqq)": "hf_quantized:backend=hqq,axis_key=1,axis_value=1",
}
#: axes of keys and values
AXES = (("channel", "token"), ("channel", "channel"), ("token", "token"), ("token", "channel"))
SIMULATED = ("fp16", "atom int4_token", "kivi int2", "logquant int2_g64")

Cell = Mapping[str, Any]


def overrides(setting: str, text: str, *options: str) -> tuple[str, ...]:
    """Return what is typed after ``python -m kvbench`` for one cell."""
    from kvbench.config.setting import parse_setting

    return (*parse_setting(setting).overrides(), "model=tiny", *TEXTS[text], "runtime.batch_size=8", *options)


def cells() -> dict[str, tuple[str, ...]]:
    """Return the runs: key of the JSON file -> overrides."""
    runs: dict[str, tuple[str, ...]] = {}
    for text in TEXTS:
        for label, setting in DECODE.items():
            runs[f"decode/{text}/{label}"] = overrides(setting, text)
        for keys, values in AXES:
            options = (f"method.key_axis={keys}", f"quantizer.value.axis={values}", "quantizer.value.group_size=32")
            default = (keys, values) == AXES[0]
            runs[f"axes/{text}/{keys}/{values}"] = overrides("kivi", text, *(() if default else options))
    for setting in ("fp16", "cocktail:encoder=bm25"):
        name = setting.partition(":")[0]
        runs[f"prefill/books/{name}"] = overrides(setting, "books", "dataset.prefill=384")
    for label in SIMULATED:
        runs[f"simulated/wikitext2/{label}"] = overrides(DECODE[label], "wikitext2", "dataset.mode=simulated")
    runs["uncached/wikitext2/fp16"] = overrides("fp16", "wikitext2", "dataset.mode=fp16")
    return runs


def perplexity_cell(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return perplexity, paired difference of the NLL to fp16 (nats per token) and compression ratio of a run."""
    (scores,) = metrics["scores"].values()
    nll = scores["nll"]
    paired = nll.get("vs_fp16") or {}
    return {
        "ppl": scores["perplexity"]["ppl"],
        "diff": paired.get("diff"),
        "stderr": paired.get("stderr"),
        "n": nll["n"],
        "ratio": metrics["kv_bytes"]["ratio"] if metrics.get("kv_bytes") else None,
        "run": metrics["run_id"],
    }


def signed(entry: Cell) -> str:
    """Return a difference and its standard error; empty for fp16."""
    return "" if not entry.get("stderr") else f"{entry['diff']:+.4f} ± {entry['stderr']:.4f}"


def perplexity_tables(content: Mapping[str, Any]) -> str:
    """Return the three tables of perplexity.md."""
    runs, scale = content["cells"], ["WikiText-2 ppl", "Δ nll", "books ppl", "Δ nll"]
    decoded, axes = [], []
    for label in DECODE:
        wiki, books = (runs[f"decode/{text}/{label}"] for text in TEXTS)
        decoded.append([label, *_perplexity_pair(wiki), *_perplexity_pair(books), f"{wiki['ratio']:.2f}"])
    for keys, values in AXES:
        wiki, books = (runs[f"axes/{text}/{keys}/{values}"] for text in TEXTS)
        axes.append([keys, values, *_perplexity_pair(wiki), *_perplexity_pair(books)])
    simulated = [[label, *_perplexity_pair(runs[f"simulated/wikitext2/{label}"])] for label in SIMULATED]
    tables = (
        grid(["method", *scale, "fp16 bytes / bytes"], decoded, "-r"),
        grid(["keys", "values", *scale], axes, "--r"),
        grid(["method", "ppl", "Δ nll"], simulated, "-r"),
    )
    return "\n".join(tables)


def _perplexity_pair(entry: Cell) -> tuple[str, str]:
    return f"{entry['ppl']:.3f}", signed(entry)


def quoted(content: Mapping[str, Any]) -> list[tuple[str, list[float | None]]]:
    """Return the sentences of perplexity.md that hold figures: words around them, and the figures."""
    runs = content["cells"]
    fp16, cocktail = (runs[f"prefill/books/{name}"] for name in ("fp16", "cocktail"))
    uncached, cached = runs["uncached/wikitext2/fp16"], runs["decode/wikitext2/fp16"]
    ratios = [
        runs[f"simulated/wikitext2/{label}"]["diff"] / runs[f"decode/wikitext2/{label}"]["diff"]
        for label in ("kivi int2", "logquant int2_g64")
    ]
    values = [cocktail["ppl"], fp16["ppl"], cocktail["diff"], cocktail["stderr"]]
    return [
        ("the books give {} against fp16's {}, {} ± {}.", values),
        ("a 2-bit method loses {} to {} times as", sorted(ratios)),
        ("gives {}, through its cache {}:", [uncached["ppl"], cached["ppl"]]),
    ]


def main() -> int:
    """Run what is missing and write the file; 1 if a cell could not be run."""
    parser = command_line("experiments.tiny.perplexity", __doc__, "results/tiny")
    parser.add_argument("--wikitext2", type=Path, required=True, help="WikiText-2's raw test split")
    parser.add_argument("--books", type=Path, required=True, help="folder of books")
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the runs")
    arguments = parser.parse_args()
    from experiments.runs import Run, execute_all
    from kvbench.results.store import RunStore

    paths = {"wikitext2": arguments.wikitext2, "books": arguments.books}
    by_overrides = {
        (*options, f"dataset.path={paths[key.split('/')[1]]}", f"runtime.results_dir={arguments.runs}"): key
        for key, options in cells().items()
    }
    # fp16 first, as others are paired with it; one pass before many steps
    ordered = sorted(by_overrides, key=lambda options: (options[0] != "method=fp16", "mode" not in " ".join(options)))
    content: dict[str, Any] = {"origin": "python -m experiments.tiny.perplexity", "cells": {}}
    failed = []
    where = place_result(arguments.out, choice(arguments))
    where.path.mkdir(parents=True, exist_ok=True)
    for outcome in execute_all([Run(options, "tiny", "perplexity") for options in ordered]):
        key = by_overrides[outcome.run.overrides]
        if outcome.status not in ("ok", "older"):
            failed.append(f"{key}: {outcome.status}: {outcome.reason}")
            continue
        metrics = RunStore(arguments.runs, outcome.id).metrics()
        assert metrics is not None
        content["cells"][key] = perplexity_cell(metrics)
        (where.path / "perplexity.json").write_text(as_json(content), encoding="utf-8")
    print("\n".join([perplexity_tables(content) if not failed else "not all cells were run:", *failed]))
    return where.say() or int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
