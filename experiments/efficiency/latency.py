"""Tables and figures of docs/bytes-and-latency.md: time per token over length, lines, compression, the paper's points.

    python -m experiments.efficiency.latency     # print the tables, in the order of the page

The figures are those of results/h200/efficiency, folded by ``python -m kvbench.bench latency``; the paper's are in
results/published/bytes_are_not_latency.csv. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from experiments.checks.rules import GIB, KI, Block, Rule, Text, range_text
from experiments.stored import ROOT, Row, benchmark_rows, csv_rows, grid, load_result_json, one, some

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
PAGE = "docs/bytes-and-latency.md"
CAPACITY, IDLE = f"{FOLDER}/capacity.json", f"{FOLDER}/energy_fp16.json"
SEVEN, EIGHT = MODELS["Llama-2-7B"], MODELS["Llama-3.1-8B"]
LONG, SHORT = 128 * KI, 4 * KI
#: read bandwidth of an H200 that shares of the ceiling refer to, in GB/s
CEILING = 4690


@cache
def folded(name: str) -> dict[str, Any]:
    """Return the folded points and lines of a model, those of larger batches among them if they were measured."""
    both: dict[str, Any] = {"points": [], "fits": []}
    for path in (f"{FOLDER}/{name}.json", f"{FOLDER}/{name}_batches.json"):
        if (ROOT / path).exists():
            both = {key: entries + load_result_json(path)[key] for key, entries in both.items()}
    return both


def latency_points(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the points of a model with these values, in the order of the file."""
    return some(folded(name)["points"], **wanted)


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


def column_table(title: str, cells: Mapping[str, Callable[[Any], str]], body: Mapping[str, Any]) -> str:
    """Return a table from functions, by the heading of their columns, and what they are called with, by line."""
    return grid([title, *cells], [[name, *(cell(row) for cell in cells.values())] for name, row in body.items()])


def token_time_table(title: str) -> str:
    """Return the table of milliseconds per token by length, with S in parentheses; an asterisk marks a CV above 3 %."""
    name = MODELS[title]
    body = []
    for setting in latency_settings(name):
        cells = [SETTINGS[setting]]
        for prompt in lengths(name):
            (point,) = latency_points(name, setting=setting, batch=1, prompt=prompt)
            if point["status"] != "ok":
                cells.append("oom")
                continue
            ratio = f" ({point['S']:.2f})" if setting != "fp16" and "S" in point else ""
            cells.append(f"{1e3 * point['tpot_s']:.2f}{'*' if point['unstable'] else ''}{ratio}")
        body.append(cells)
    return grid([title, *(f"{prompt // 1024}k" for prompt in lengths(name))], body)


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

    def bound(last: Mapping[str, Any], form: Callable[[float], str]) -> str:
        return form(last["S_cache"]) if last.get("S_cache") is not None else "-"

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


def beside() -> str:
    """Return the table of the paper's points and of the same points on our machine, in ms per step (S)."""
    paper = [row for row in csv_rows(PAPER) if row["table"] == "4"]
    places = list(dict.fromkeys((int(row["batch"]), row["length"]) for row in paper))
    body = []
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
        body += [paper_cells, our_cells]
    return grid(["Llama-3.1-8B, ms (S)", *(f"B {batch}, {length}" for batch, length in places)], body)


def goodput() -> str:
    """Return the table of simulated goodput in requests per second, by the rate at which requests arrive."""
    measured = benchmark_rows(f"{FOLDER}/goodput.json")
    rates = sorted({row["rate"] for row in measured})
    names = {"fp16": "fp16", "kivi:int4_g128": "kivi int4, G 128"}
    body = []
    for setting in dict.fromkeys(row["setting"] for row in measured):
        own = {row["rate"]: row for row in some(measured, setting=setting)}
        name = names.get(setting, "logquant int2, W 64")
        cells = [f"{own[rate]['goodput']:.2f} ({100 * own[rate]['good']:.0f} %)" for rate in rates]
        body.append([name, str(own[rates[0]]["most"]), *cells])
    return grid(["simulated", "most at a time", *(f"{rate:g} a second" for rate in rates)], body)


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
        {SETTINGS[row["setting"]]: row for row in benchmark_rows(f"{FOLDER}/capacity.json")},
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
            SETTINGS[name]: benchmark_rows(f"{FOLDER}/energy_{name.rpartition(':')[2]}.json")[0]
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


def latency_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block(PAGE, beside(), f"{FOLDER}, {PAPER}", "beside")
    of_models = {"times": token_time_table, "lines": fitted_line_table, "compression": compression}
    for mark, make in of_models.items():
        yield Block(PAGE, "\n".join(make(title) for title in MODELS), FOLDER, mark)
    for mark, whole in {"capacity": capacity, "goodput": goodput, "energy": energy}.items():
        yield Block(PAGE, whole(), FOLDER, mark)
    yield from _sentences()


def packed(name: str) -> list[Row]:
    """Return the points of a model with one sequence and a quantized cache."""
    return [point for point in latency_points(name, batch=1, status="ok") if point["setting"] != "fp16"]


def faster(name: str) -> str:
    """Return how many of these points are more than 1 % faster than fp16, of how many."""
    return f"{sum(point['S'] > 1.01 for point in packed(name))} of {len(packed(name))}"


def at(name: str, bits: str, prompt: int, key: str) -> float:
    """Return a figure of KIVI at one point."""
    return float(one(latency_points(name, batch=1, setting=f"kivi:{bits}", prompt=prompt))[key])


def allocated(name: str, prompt: int) -> str:
    """Return the allocated compression in 4 and in 2 bits."""
    return " and ".join(str(at(name, bits, prompt, "r_alloc")) for bits in ("int4", "int2"))


def packed_lines(name: str) -> list[Row]:
    """Return the fitted lines of the quantized caches."""
    return [row for setting, row in fits(name).items() if setting != "fp16"]


def even_lengths(name: str) -> str:
    """Return the range of break-even lengths in hundreds of tokens."""
    return range_text(100 * round(row["break_even"] / 100) for row in packed_lines(name))


def fixed(name: str) -> str:
    """Return the range of milliseconds by which c0 is above fp16's."""
    return range_text(1e3 * (row["c0_s"] - fits(name)["fp16"]["c0_s"]) for row in packed_lines(name))


def rate(name: str, setting: str) -> float:
    """Return the bandwidth at which a cache is read, in per cent of the ceiling."""
    return float(100 * fits(name)[setting]["BW_eff_GB_s"] / CEILING)


def _sentences() -> list[Text]:
    """Return the sentences."""
    best = [max(point["S"] for point in packed(name)) for name in (SEVEN, EIGHT)]
    bound = max(point["S_cache"] for point in packed(EIGHT) if point["prompt"] == SHORT)
    shares = [100 * point["S"] / point["S_cache"] for point in packed(EIGHT) if point["prompt"] == LONG]
    int8, int4, int2 = (rate(EIGHT, f"kivi:{bits}") for bits in ("int8", "int4", "int2"))
    full = one(benchmark_rows(CAPACITY), setting="kivi:int8")
    free = full["memory"] - full["weights"] - full["allocated"] * full["per_sequence"]
    rates = [rate(SEVEN, setting) for setting in fits(SEVEN)]
    return [
        Text(PAGE, FOLDER, f"Here {faster(SEVEN)} points are more than 1 % faster with Llama-2-7B, and"),
        Text(PAGE, FOLDER, f"faster with Llama-2-7B, and {faster(EIGHT)} with Llama-3.1-8B. S"),
        Text(PAGE, FOLDER, f"Llama-3.1-8B. S reaches {best[0]} and {best[1]}, at"),
        Text(PAGE, FOLDER, f"could make Llama-3.1-8B at most {bound} times as fast"),
        Text(PAGE, FOLDER, f"are {even_lengths(SEVEN)} tokens with Llama-2-7B, whose cache is four times as large"),
        Text(PAGE, FOLDER, f"four times as large per token, and {even_lengths(EIGHT)} with Llama-3.1-8B"),
        Text(PAGE, FOLDER, f"caches are read at {range_text(rates)} % of the ceiling in every format"),
        Text(PAGE, FOLDER, f"caches are read at {int8} % (int8), {int4} % (int4) and {int2} % (int2)"),
        Text(PAGE, FOLDER, f"at 128k S is {range_text(shares)} % of S_cache"),
        Text(PAGE, FOLDER, f"(c0) is {fixed(SEVEN)} ms above fp16's with Llama-2-7B and {fixed(EIGHT)} ms with"),
        Text(PAGE, FOLDER, f"where r_alloc is {allocated(SEVEN, LONG)}"),
        Text(PAGE, FOLDER, f"take more: {allocated(EIGHT, SHORT)} with"),
        Text(PAGE, FOLDER, f"S is {at(SEVEN, 'int8', LONG, 'S')} and {at(EIGHT, 'int8', LONG, 'S')} at 128k"),
        Text(PAGE, IDLE, f"Idle it drew {load_result_json(IDLE)['machine']['idle_W']} W"),
        Text(PAGE, CAPACITY, f"of which {benchmark_rows(CAPACITY)[0]['weights'] / GIB} GiB are Llama-2-7B's weights"),
        Text(PAGE, CAPACITY, f"by the sum, {free / GIB} GiB were still free after four"),
        Text(PAGE, CAPACITY, f"fifth takes {full['per_sequence'] / GIB} GiB and {full['workspace'] / GIB} for a"),
    ]


if __name__ == "__main__":
    print("\n".join(latency_tables()))
