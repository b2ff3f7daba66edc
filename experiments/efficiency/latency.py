"""Tables of docs/bytes-and-latency.md: time per token over length, lines, compression, and the paper's points beside.

    python -m experiments.efficiency.latency     # print the tables, in the order of the page

The figures are those of results/h200/efficiency, folded by ``python -m kvbench.bench latency``; the paper's are in
results/published/bytes_are_not_latency.csv. Imports no torch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAPER = "results/h200/efficiency", "results/published/bytes_are_not_latency.csv"
#: title -> file of the folded points
MODELS = {"Llama-2-7B": "llama2-7b", "Llama-3.1-8B": "llama3.1-8b"}
#: setting -> its name in the tables, in their order
SETTINGS = {
    "fp16": "fp16",
    "kivi:int8": "kivi int8, G 32",
    "kivi:int4": "kivi int4, G 32",
    "kivi:int4_g128": "kivi int4, G 128",
    "kivi:int2": "kivi int2, G 32",
    "kivi:int2_g128": "kivi int2, G 128",
}
#: the paper's configuration -> ours with the same formats
BESIDE = {"BF16": "fp16", "KIVI-k4v4": "kivi:int4", "KIVI-k2v2": "kivi:int2"}


@cache
def folded(name: str) -> dict[str, Any]:
    """Return the folded points and lines of a model, those of larger batches among them if they were measured."""
    both: dict[str, Any] = {"points": [], "fits": []}
    for path in (ROOT / FOLDER / f"{name}.json", ROOT / FOLDER / f"{name}_batches.json"):
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))
            both = {key: rows + measured[key] for key, rows in both.items()}
    return both


def latency_points(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the points of a model with these values, in the order of the file."""
    return [row for row in folded(name)["points"] if all(row.get(key) == value for key, value in wanted.items())]


def fits(name: str, batch: int = 1) -> dict[str, dict[str, Any]]:
    """Return the lines of a model by setting."""
    return {row["setting"]: row for row in folded(name)["fits"] if row["batch"] == batch}


def lengths(name: str, batch: int = 1) -> list[int]:
    """Return the prompt lengths of a model's points."""
    return sorted({row["prompt"] for row in latency_points(name, batch=batch)})


def latency_settings(name: str) -> list[str]:
    """Return the settings of a model in the order of the tables."""
    measured = {row["setting"] for row in latency_points(name)}
    return [setting for setting in SETTINGS if setting in measured]


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; numbers are aligned to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def column_table(title: str, cells: Mapping[str, Callable[[Any], str]], rows: Mapping[str, Any]) -> str:
    """Return a table from functions, by the heading of their columns, and what they are called with, by line."""
    return aligned_table(
        [title, *cells], [[name, *(cell(row) for cell in cells.values())] for name, row in rows.items()]
    )


def token_time_table(title: str) -> str:
    """Return the table of milliseconds per token by length, with S in parentheses; an asterisk marks a CV above 3 %."""
    name = MODELS[title]
    rows = []
    for setting in latency_settings(name):
        cells = [SETTINGS[setting]]
        for prompt in lengths(name):
            (point,) = latency_points(name, setting=setting, batch=1, prompt=prompt)
            if point["status"] != "ok":
                cells.append("oom")
                continue
            ratio = f" ({point['S']:.2f})" if setting != "fp16" and "S" in point else ""
            cells.append(f"{1e3 * point['tpot_s']:.2f}{'*' if point['unstable'] else ''}{ratio}")
        rows.append(cells)
    return aligned_table([title, *(f"{prompt // 1024}k" for prompt in lengths(name))], rows)


def fitted_line_table(title: str) -> str:
    """Return the table of the fitted lines with the break-even lengths."""
    name = MODELS[title]
    fitted = {setting: fits(name)[setting] for setting in latency_settings(name) if setting in fits(name)}
    ceilings = {setting: latency_points(name, setting=setting, batch=1)[0]["ceiling_GB_s"] for setting in fitted}
    return column_table(
        title,
        {
            "ns per token": lambda fit: f"{1e9 * fit['slope_s']:.1f}{spread(fit['slopes_s'], 1e9)}",
            "ms at length 0": lambda fit: f"{1e3 * fit['intercept_s']:.2f}{spread(fit['intercepts_s'], 1e3, 2)}",
            "R²": lambda fit: f"{fit['r2']:.5f}",
            "break-even, tokens": even,
            "cache GB/s": lambda fit: f"{fit['BW_eff_GB_s']:,.0f}",
            "of the ceiling": lambda fit: f"{100 * fit['BW_eff_GB_s'] / ceilings[fit['setting']]:.0f} %",
            "c0, ms": lambda fit: f"{1e3 * fit['c0_s']:.2f}",
        },
        {SETTINGS[setting]: fit for setting, fit in fitted.items()},
    )


def spread(samples: Sequence[float], factor: float, digits: int = 1) -> str:
    """Return half the range of the processes' figures as text, such as `` ±0.2``; empty for a single process."""
    if len(samples) < 2:
        return ""
    return f" ±{factor * (max(samples) - min(samples)) / 2:.{digits}f}"


def even(fit: dict[str, Any]) -> str:
    """Return the break-even length of a line and its range over processes."""
    if "break_even" not in fit:
        return "-"
    if fit["break_even"] is None:
        return "none"
    own = [length for length in fit["break_evens"] if length is not None]
    text = "any" if fit["break_even"] == 0 else f"{fit['break_even']:,.0f}"
    if len(own) < 2 or min(own) == max(own):
        return text
    return f"{text} ({min(own):,.0f} to {max(own):,.0f})"


def compression(title: str) -> str:
    """Return the table of compression and of what it could give at the shortest and at the longest length."""
    name = MODELS[title]
    ends = {}
    for setting in latency_settings(name):
        good = [point for point in latency_points(name, setting=setting, batch=1) if point["status"] == "ok"]
        good.sort(key=lambda point: point["prompt"])
        ends[SETTINGS[setting]] = good[0], good[-1]
    shortest, longest = (f"{end // 1024}k" for end in (lengths(name)[0], lengths(name)[-1]))

    def bound(last: Mapping[str, Any], text: Callable[[float], str]) -> str:
        return text(last["S_cache"]) if last.get("S_cache") is not None else "-"

    return column_table(
        title,
        {
            "r_nom": lambda pair: f"{pair[1]['r_nom']:.2f}",
            f"r_alloc, {shortest}": lambda pair: f"{pair[0]['r_alloc']:.2f}",
            f"r_alloc, {longest}": lambda pair: f"{pair[1]['r_alloc']:.2f}",
            "GB a step": lambda pair: f"{pair[1]['read_bytes'] / 1e9:.1f}",
            "GB/s": lambda pair: f"{pair[1]['GB_s']:,.0f}",
            "of the ceiling": lambda pair: f"{100 * pair[1]['read_share']:.0f} %",
            "S": lambda pair: f"{pair[1]['S']:.2f}" if "S" in pair[1] else "-",
            "S_cache": lambda pair: bound(pair[1], lambda most: f"{most:.2f}"),
            "S of S_cache": lambda pair: bound(pair[1], lambda most: f"{100 * pair[1]['S'] / most:.0f} %"),
        },
        ends,
    )


@cache
def published() -> list[dict[str, str]]:
    """Return the paper's numbers, one for each row."""
    with (ROOT / PAPER).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def beside() -> str:
    """Return the table of the paper's points and of the same points on our machine, in ms per step (S)."""
    paper = [row for row in published() if row["table"] == "4"]
    places = list(dict.fromkeys((int(row["batch"]), row["length"]) for row in paper))
    rows = []
    for configuration, setting in BESIDE.items():
        paper_cells, our_cells = [f"paper: {configuration}"], [f"H200: {SETTINGS[setting]}"]
        for batch, length in places:
            at = {(row["configuration"], int(row["batch"]), row["length"]): float(row["value"]) for row in paper}
            value, full = at[configuration, batch, length], at["BF16", batch, length]
            paper_cells.append(f"{value:.2f}" + ("" if configuration == "BF16" else f" ({full / value:.2f})"))
            own = latency_points(MODELS["Llama-3.1-8B"], setting=setting, batch=batch, prompt=1024 * int(length[:-1]))
            if not own or own[0]["status"] != "ok":
                our_cells.append("-")
                continue
            ratio = "" if setting == "fp16" else f" ({own[0]['S']:.2f})"
            our_cells.append(f"{1e3 * own[0]['tpot_s']:.2f}{ratio}")
        rows += [paper_cells, our_cells]
    return aligned_table(["Llama-3.1-8B, ms (S)", *(f"B {batch}, {length}" for batch, length in places)], rows)


def content(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of the folder."""
    rows: list[dict[str, Any]] = json.loads((ROOT / FOLDER / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def goodput() -> str:
    """Return the table of simulated goodput in requests per second, by the rate at which requests arrive."""
    rows = content("goodput")
    rates = sorted({row["rate"] for row in rows})
    names = {"fp16": "fp16", "kivi:int4_g128": "kivi int4, G 128"}
    body = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = {row["rate"]: row for row in rows if row["setting"] == setting}
        name = names.get(setting, "logquant int2, W 64")
        cells = [f"{own[rate]['goodput']:.2f} ({100 * own[rate]['good']:.0f} %)" for rate in rates]
        body.append([name, str(own[rates[0]]["most"]), *cells])
    return aligned_table(["simulated", "most at a time", *(f"{rate:g} a second" for rate in rates)], body)


def capacity() -> str:
    """Return the table of sequences that fit into a memory, by formula and by allocation."""
    return column_table(
        "Llama-2-7B, 32k",
        {
            "GiB a sequence": lambda row: f"{row['per_sequence'] / 2**30:.2f}",
            "workspace": lambda row: f"{row['workspace'] / 2**30:.2f}",
            "by formula": lambda row: str(row["by_formula"]),
            "allocated": lambda row: str(row["allocated"]),
        },
        {SETTINGS[row["setting"]]: row for row in content("capacity")},
    )


def energy() -> str:
    """Return the table of energy per token at one length."""
    return column_table(
        "Llama-2-7B, 32k",
        {
            "J per token": lambda row: f"{row['energy']['J_per_token']:.2f}",
            "W": lambda row: f"{row['energy']['W']:.0f}",
            "ms per token": lambda row: f"{1e3 * row['tpot_s']['median']:.2f}",
            "measured for, s": lambda row: f"{row['energy']['s']:.1f}",
        },
        {
            SETTINGS[name]: content(f"energy_{name.rpartition(':')[2]}")[0]
            for name in ("fp16", "kivi:int4", "kivi:int2")
        },
    )


def latency_tables() -> Iterator[str]:
    """Yield the tables in the order of the page."""
    yield beside()
    for make in (token_time_table, fitted_line_table, compression):
        for title in MODELS:
            yield make(title)
    yield capacity()
    yield goodput()
    yield energy()


if __name__ == "__main__":
    print("\n".join(latency_tables()))
