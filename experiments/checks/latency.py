"""Figures of results/h200/efficiency in docs/bytes-and-latency.md."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.figures import GIB, KI, Row, benchmark_rows, load_result_json, one, range_text
from experiments.checks.rules import Block, Rule, Text
from experiments.efficiency import latency
from experiments.efficiency.latency import FOLDER, MODELS, PAPER, fits, latency_points

PAGE = "docs/bytes-and-latency.md"
CAPACITY, IDLE = f"{FOLDER}/capacity.json", f"{FOLDER}/energy_fp16.json"
SEVEN, EIGHT = MODELS["Llama-2-7B"], MODELS["Llama-3.1-8B"]
LONG, SHORT = 128 * KI, 4 * KI
#: read bandwidth of an H200 that shares of the ceiling refer to, in GB/s
CEILING = 4690


def latency_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block(PAGE, latency.beside(), f"{FOLDER}, {PAPER}", "beside")
    of_models = {
        "times": latency.token_time_table,
        "lines": latency.fitted_line_table,
        "compression": latency.compression,
    }
    for mark, make in of_models.items():
        yield Block(PAGE, "\n".join(make(title) for title in MODELS), FOLDER, mark)
    for table in (latency.capacity, latency.goodput, latency.energy):
        yield Block(PAGE, table(), FOLDER, table.__name__)
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


def fitted_line_rows(name: str) -> list[Row]:
    """Return the fitted lines of the quantized caches."""
    return [row for setting, row in fits(name).items() if setting != "fp16"]


def even(name: str) -> str:
    """Return the range of break-even lengths in hundreds of tokens."""
    return range_text(100 * round(row["break_even"] / 100) for row in fitted_line_rows(name))


def fixed(name: str) -> str:
    """Return the range of milliseconds by which c0 is above fp16's."""
    return range_text(1e3 * (row["c0_s"] - fits(name)["fp16"]["c0_s"]) for row in fitted_line_rows(name))


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
        Text(PAGE, FOLDER, f"are {even(SEVEN)} tokens with Llama-2-7B, whose cache is four times as large"),
        Text(PAGE, FOLDER, f"four times as large per token, and {even(EIGHT)} with Llama-3.1-8B"),
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
