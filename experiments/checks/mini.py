"""Rules for the comparison on mini (results/mini) and what other documents quote of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import ROOT, Row, Rule, Text, Whole, load, one
from experiments.mini.report import markdown

PAGE = "results/mini/README.md"
SCORES, PAIRS = "results/mini/scores.json", "results/mini/pairs.json"
CLAIMS = "## The papers' claims, on this model"


def setting(name: str) -> dict[str, Any]:
    """Return a setting's figures over the three tasks that all have finished."""
    return one(load(SCORES), name=name)


def to_fp16(name: str) -> list[float]:
    """Return a setting's difference to fp16 in points and its standard error."""
    cell = setting(name)["mean"]["vs_fp16"]
    return [100 * cell["diff"], 100 * cell["stderr"]]


def mib(name: str) -> float:
    """Return a setting's KV bytes in MiB."""
    return float(setting(name)["kv_bytes"]["used"] / 2**20)


def pair(first: str, second: str, file: str = PAIRS) -> dict[str, Any]:
    """Return a comparison of two settings."""
    return one(load(file), first=first, second=second)


def difference(first: str, second: str, file: str = PAIRS, by: str = "mean") -> list[float]:
    """Return `first` less `second` in points, and its standard error."""
    cell = pair(first, second, file)[by]
    return [100 * cell["diff"], 100 * cell["stderr"]]


def count(first: str, second: str, file: str = PAIRS) -> int:
    """Return the number of samples that both settings have done."""
    return int(pair(first, second, file)["mean"]["n"])


def bytes_of(first: str, second: str, file: str = PAIRS) -> list[float]:
    """Return the KV bytes of both settings over the samples of the pair, in MiB."""
    return [pair(first, second, file)["kv_bytes"][side] / 2**20 for side in ("first", "second")]


def rules() -> Iterator[Rule]:
    """Yield the rules of results/mini."""
    for folder in ("results/mini", "results/mini/all", "results/mini/search"):
        yield Whole(
            f"{folder}/table.md",
            markdown(load(f"{folder}/scores.json"), load(f"{folder}/pairs.json")),
            f"{folder}/scores.json, pairs.json",
        )
    yield from _claims()
    yield from _counts()
    yield from _chunks()
    yield from _search()


def _claims() -> Iterator[Rule]:
    per_channel, kivi = ("kivi 2", "kivi 2, key per token"), "kivi 2"
    even = ("logquant 2", "kivi 2, G 64")
    mean = pair(*even)["mean"]
    yield _row("KIVI: keys per channel beat keys per token (2 bits, same bytes)", *per_channel)
    label = "LogQuant beats KIVI at equal bytes (2 bits; 2.94 MiB against KIVI's 2.88 with groups of 64)"
    shown = [*difference(*even), count(*even), *difference(*even, by="by_task"), mean["diff"] / mean["stderr"]]
    yield Row(PAGE, CLAIMS, label, shown, PAIRS)
    yield Text(PAGE, "(2 bits; {} MiB against KIVI's {} with groups of 64)", bytes_of(*even), PAIRS)
    yield _row("... against KIVI with groups of 32 (3.36 MiB, 14 % more)", "logquant 2", kivi)
    logquant, uniform = bytes_of("logquant 2", kivi)
    more = [uniform, 100 * (uniform / logquant - 1)]
    yield Text(PAGE, "groups of 32 ({} MiB, {} % more)", more, PAIRS)
    for label, first, seconds in (
        (
            'LogQuant beats the "KiVi" of its paper, transformers\' QuantizedCache (hqq; quanto)',
            "logquant 2",
            ("hf_quantized 2 (hqq)", "hf_quantized 2 (quanto)"),
        ),
        (
            "... with keys per token, as LogQuant's released code has them",
            "logquant 2, key per token",
            ("hf_quantized 2 (hqq)", "hf_quantized 2 (quanto)"),
        ),
        (
            "... against its own streaming window (sinks and the newest, keys per token)",
            "logquant 2, key per token",
            ("hf streaming 2 (hqq)", "hf streaming 2 (quanto)"),
        ),
    ):
        numbers = list(dict.fromkeys(count(first, second) for second in seconds))
        values = [value for second in seconds for value in difference(first, second)]
        yield Row(PAGE, CLAIMS, label, [*values, *numbers], PAIRS)
    yield _row("PartialLogQuant loses little (LogQuant less Partial)", "logquant 2", "partial_logquant 2")
    evicting = ("logquant 2", "logquant evict, bytes of logquant 2")
    yield _row("LogQuant, Table 4: quantizing beats evicting (same bytes)", *evicting)
    names = ("kivi evict", "streamingllm", "snapkv", "h2o")
    others = [difference(kivi, f"{name}, bytes of kivi 2") for name in names]
    values = [*(value[0] for value in others), max(value[1] for value in others)]
    yield Row(PAGE, CLAIMS, "the same for KIVI, StreamingLLM, SnapKV, H2O at KIVI's bytes", values, PAIRS)
    per_token, random = "cocktail 15/35/50, per token", "the same, random chunks"
    label = "Cocktail beats uniform quantization: kivi 2 (Cocktail 3.24 MiB, KIVI 3.36)"
    yield _row(label, "cocktail", kivi)
    yield Text(PAGE, "kivi 2 (Cocktail {} MiB, KIVI {})", bytes_of("cocktail", kivi), PAIRS)
    mine, atom = bytes_of("cocktail", "atom 2")
    values = [*difference("cocktail", "atom 2"), count("cocktail", "atom 2"), 100 * (mine / atom - 1)]
    yield Row(PAGE, CLAIMS, "... Atom at 2 bits (2.49 MiB)", values, PAIRS)
    yield Text(PAGE, "... Atom at 2 bits ({} MiB)", [atom], PAIRS)
    label = "... KIVI at 4 bits (15/35/50, keys per token, 5.50 MiB, KIVI 5.28)"
    yield Row(PAGE, CLAIMS, label, [*difference(per_token, "kivi 4"), count(per_token, "kivi 4"), None], PAIRS)
    yield Text(PAGE, "keys per token, {} MiB, KIVI {})", bytes_of(per_token, "kivi 4"), PAIRS)
    searches = (("cocktail", "cocktail, random chunks"), (per_token, random))
    first, second = ([*difference(*names), count(*names)] for names in searches)
    values = [*first, None, None, None, *second]
    yield Row(PAGE, CLAIMS, "Cocktail, Table V: the search beats random chunks", values, PAIRS)
    kvquant = ("kvquant 2, 1% outliers", kivi)
    small, large = bytes_of(*kvquant)
    label = "KVQuant at 2 bits beats KIVI at 2 bits (2.53 MiB against 3.38)"
    yield Row(PAGE, CLAIMS, label, [*difference(*kvquant), count(*kvquant), 100 * (1 - small / large)], PAIRS)
    yield Text(PAGE, "KIVI at 2 bits ({} MiB against {})", [small, large], PAIRS)
    fours = [value for name in ("kivi 4", "logquant 4", "atom 4") for value in to_fp16(name)]
    n = setting("kivi 4")["mean"]["n"]
    outliers = one(load("results/mini/all/scores.json"), name="kvquant 4, 1% outliers")["mean"]
    cost = [100 * outliers["vs_fp16"][key] for key in ("diff", "stderr")]
    values = [*fours, n, *cost, outliers["n"], *to_fp16("quantspec (both nibbles)"), n]
    label = "4 bits cost nothing (KIVI, LogQuant, Atom, KVQuant; QuantSpec's two nibbles)"
    yield Row(PAGE, CLAIMS, label, values, f"{SCORES}, all/scores.json")


def _row(label: str, first: str, second: str) -> Row:
    """Return the rule of a claim that one pair decides: difference, standard error, samples."""
    return Row(PAGE, CLAIMS, label, [*difference(first, second), count(first, second)], PAIRS)


def _counts() -> Iterator[Rule]:
    rows = load(SCORES)
    n = rows[0]["mean"]["n"]
    most = max(entry["mean"]["n"] for entry in load(PAIRS))
    tasks = max(len(entry["tasks"]) for entry in load(PAIRS))
    pattern = "{} settings over the three tasks that all of them finished, n = {} a task ({} paired samples)"
    yield Text(PAGE, pattern, [len(rows), n / len(rows[0]["tasks"]), n], SCORES)
    assert tasks == 6, "results/mini/README.md says: up to six tasks"
    yield Text(PAGE, "(up to six tasks, {} samples)", [most], PAIRS)
    every = load("results/mini/all/scores.json")[0]["mean"]["n"]
    yield Text(PAGE, "two tasks, n = {}.", [every], "results/mini/all/scores.json")
    whole = load("results/mini/search/pairs.json")[0]["mean"]["n"]
    yield Text(PAGE, "random chunks of the same bytes, n = {}.", [whole], "results/mini/search/pairs.json")
    yield Text("README.md", "With {} samples and {} settings ([results/mini]", [n, len(rows)], SCORES)


def _chunks() -> Iterator[Rule]:
    file = "results/mini/chunks.md"
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    figures = {(row[0], row[1]): [float(cell.split()[0]) for cell in row[2:5]] for row in cells[1:]}
    for task in dict.fromkeys(task for task, _ in figures):
        label = "multi_value (its three places)" if task == "multi_value" else task
        values = [*figures[task, "whole words"], *figures[task, "tokens, decoded"]]
        yield Row(PAGE, "## Chunk search without a model", label, values, file)


def _search() -> Iterator[Rule]:
    file = "results/mini/search/pairs.json"
    entry = load(file)[0]
    after = "## Search against random chunks of the same bytes"
    for label, cell in (
        *((name.split("@")[0], cell) for name, cell in entry["tasks"].items()),
        ("both", entry["mean"]),
    ):
        values = [100 * cell[key] for key in ("first", "second", "diff", "stderr")]
        yield Row(PAGE, after, label, [*values, cell["n"]], file)
    yield Text(PAGE, "drawn at random; {} MiB on both sides", [entry["kv_bytes"]["first"] / 2**20], file)
