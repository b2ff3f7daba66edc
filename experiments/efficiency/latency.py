"""Tables of docs/bytes-and-latency.md: time per token over length, lines, compression, and the paper's points beside.

    python -m experiments.efficiency.latency     # print the tables, in the order of the page

The figures are those of results/h200/efficiency, folded by ``python -m kvbench.bench latency``; the paper's are in
results/published/bytes_are_not_latency.csv. Imports no torch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
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


def points(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the points of a model with these values, in the order of the file."""
    return [row for row in folded(name)["points"] if all(row.get(key) == value for key, value in wanted.items())]


def fits(name: str, batch: int = 1) -> dict[str, dict[str, Any]]:
    """Return the lines of a model by setting."""
    return {row["setting"]: row for row in folded(name)["fits"] if row["batch"] == batch}


def lengths(name: str, batch: int = 1) -> list[int]:
    """Return the prompt lengths of a model's points."""
    return sorted({row["prompt"] for row in points(name, batch=batch)})


def shown(name: str) -> list[str]:
    """Return the settings of a model in the order of the tables."""
    measured = {row["setting"] for row in points(name)}
    return [setting for setting in SETTINGS if setting in measured]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; numbers are aligned to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def times(title: str) -> str:
    """Return the table of milliseconds per token by length, with S in parentheses; an asterisk marks a CV above 3 %."""
    name = MODELS[title]
    rows = []
    for setting in shown(name):
        cells = [SETTINGS[setting]]
        for prompt in lengths(name):
            (point,) = points(name, setting=setting, batch=1, prompt=prompt)
            if point["status"] != "ok":
                cells.append("oom")
                continue
            ratio = f" ({point['S']:.2f})" if setting != "fp16" and "S" in point else ""
            cells.append(f"{1e3 * point['tpot_s']:.2f}{'*' if point['unstable'] else ''}{ratio}")
        rows.append(cells)
    return table([title, *(f"{prompt // 1024}k" for prompt in lengths(name))], rows)


def lines(title: str) -> str:
    """Return the table of the fitted lines with the break-even lengths."""
    name = MODELS[title]
    rows = []
    for setting in shown(name):
        fit = fits(name).get(setting)
        if fit is None:
            continue
        ceiling = points(name, setting=setting, batch=1)[0]["ceiling_GB_s"]
        rows.append(
            [
                SETTINGS[setting],
                f"{1e9 * fit['slope_s']:.1f}{spread(fit['slopes_s'], 1e9)}",
                f"{1e3 * fit['intercept_s']:.2f}{spread(fit['intercepts_s'], 1e3, 2)}",
                f"{fit['r2']:.5f}",
                even(fit),
                f"{fit['BW_eff_GB_s']:,.0f}",
                f"{100 * fit['BW_eff_GB_s'] / ceiling:.0f} %",
                f"{1e3 * fit['c0_s']:.2f}",
            ]
        )
    head = (
        title,
        "ns per token",
        "ms at length 0",
        "R²",
        "break-even, tokens",
        "cache GB/s",
        "of the ceiling",
        "c0, ms",
    )
    return table(head, rows)


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
    rows = []
    for setting in shown(name):
        good = [point for point in points(name, setting=setting, batch=1) if point["status"] == "ok"]
        first, last = min(good, key=lambda p: p["prompt"]), max(good, key=lambda p: p["prompt"])
        bound = last.get("S_cache")
        rows.append(
            [
                SETTINGS[setting],
                f"{last['r_nom']:.2f}",
                f"{first['r_alloc']:.2f}",
                f"{last['r_alloc']:.2f}",
                f"{last['read_bytes'] / 1e9:.1f}",
                f"{last['GB_s']:,.0f}",
                f"{100 * last['read_share']:.0f} %",
                f"{last['S']:.2f}" if "S" in last else "-",
                "-" if bound is None else f"{bound:.2f}",
                "-" if bound is None else f"{100 * last['S'] / bound:.0f} %",
            ]
        )
    first_length, last_length = (f"{end // 1024}k" for end in (lengths(name)[0], lengths(name)[-1]))
    head = [
        title,
        "r_nom",
        f"r_alloc, {first_length}",
        f"r_alloc, {last_length}",
        "GB a step",
        "GB/s",
        "of the ceiling",
    ]
    return table([*head, "S", "S_cache", "S of S_cache"], rows)


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
            own = points(MODELS["Llama-3.1-8B"], setting=setting, batch=batch, prompt=1024 * int(length[:-1]))
            if not own or own[0]["status"] != "ok":
                our_cells.append("-")
                continue
            ratio = "" if setting == "fp16" else f" ({own[0]['S']:.2f})"
            our_cells.append(f"{1e3 * own[0]['tpot_s']:.2f}{ratio}")
        rows += [paper_cells, our_cells]
    return table(["Llama-3.1-8B, ms (S)", *(f"B {batch}, {length}" for batch, length in places)], rows)


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
    return table(["simulated", "most at a time", *(f"{rate:g} a second" for rate in rates)], body)


def capacity() -> str:
    """Return the table of sequences that fit into a memory, by formula and by allocation."""
    gib, rows = 2**30, []
    for row in content("capacity"):
        sizes = [row["per_sequence"] / gib, row["workspace"] / gib]
        numbers = [str(row["by_formula"]), str(row["allocated"])]
        rows.append([SETTINGS[row["setting"]], *(f"{size:.2f}" for size in sizes), *numbers])
    return table(["Llama-2-7B, 32k", "GiB a sequence", "workspace", "by formula", "allocated"], rows)


def energy() -> str:
    """Return the table of energy per token at one length."""
    rows = []
    for setting in ("fp16", "kivi:int4", "kivi:int2"):
        (row,) = content(f"energy_{setting.rpartition(':')[2]}")
        used = row["energy"]
        cells = [
            f"{used['J_per_token']:.2f}",
            f"{used['W']:.0f}",
            f"{1e3 * row['tpot_s']['median']:.2f}",
            f"{used['s']:.1f}",
        ]
        rows.append([SETTINGS[setting], *cells])
    return table(["Llama-2-7B, 32k", "J per token", "W", "ms per token", "measured for, s"], rows)


def tables() -> Iterator[str]:
    """Yield the tables in the order of the page."""
    yield beside()
    for make in (times, lines, compression):
        for title in MODELS:
            yield make(title)
    yield capacity()
    yield goodput()
    yield energy()


if __name__ == "__main__":
    print("\n".join(tables()))
