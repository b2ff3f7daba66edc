"""Tables of results/h200 and docs/speed.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments import speculation
from experiments.cells.states import cells_block
from experiments.checks import h200
from experiments.checks.h200 import (
    FIRST,
    FOLDER,
    H2O,
    ODD,
    PAGE,
    PREFILL,
    SECOND,
    SETTINGS,
    SPEED,
    TPOT,
    median,
    roof,
    step,
)
from experiments.checks.rules import GIB, KI, Block, Rule, three
from experiments.stored import Row, benchmark_rows, grid, load_result_json, one, some

PRODUCTS, HOUSE = f"{FOLDER}/products.json", f"{FOLDER}/house"
#: lines of the table of attention: label, microseconds that were aimed at, and the point
POINTS: tuple[tuple[str, int, tuple[Any, ...]], ...] = (
    ("int4 G128, 7B B1 4k", 12, ("7b", 1, 4, "int4_g128")),
    ("... 32k", 41, ("7b", 1, 32, "int4_g128")),
    ("... 128k", 140, ("7b", 1, 128, "int4_g128")),
    ("... 7B B8 32k", 265, ("7b", 8, 32, "int4_g128")),
    ("... 8B B1 128k", 45, ("8b", 1, 128, "int4_g128")),
    ("... 8B B16 32k", 140, ("8b", 16, 32, "int4_g128")),
    ("int4 K G32 V G32, 7B B1 128k", 172, ("7b", 1, 128, "int4_g32")),
    ("int8 (two nibbles), 7B B1 32k", 75, ("7b", 1, 32, "int8")),
    ("... 128k", 262, ("7b", 1, 128, "int8")),
    ("... 32k, 5 new tokens", 75, ("7b", 1, 32, "int8", 5)),
    ("int2 G128, 7B B1 128k", 98, ("7b", 1, 128, "int2_g128")),
    ("... 7B B8 32k", 185, ("7b", 8, 32, "int2_g128")),
    ("int8, 8B B1 128k, 5 new tokens (20 rows)", 145, ("8b", 1, 128, "int8", 5)),
)
#: milliseconds at 32k and 128k tokens that were aimed at, as the table of steps says them
GATES = {
    "fp16": ("8.5", "19.5"),
    "kivi int4, G 128": ("5.6", "8.8"),
    "kivi int4, G 32": ("5.9", "9.5"),
    "kivi int2, G 128": ("5.3", "-"),
    "logquant int2, W 64": ("5.3", "-"),
    "cocktail 10/30/60": ("70 % of fp16", "52 %"),
}
#: settings of the batches, with the words of their files
BATCHES = {
    "fp16": "fp16",
    "kivi int4, G 128": "kivi",
    "logquant int2, W 64": "logquant",
    "cocktail 10/30/60": "cocktail",
}


def h200_table_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block(PAGE, attention_point_table(), f"{FIRST}, {SECOND}", "attention")
    yield Block(SPEED, layers(), FIRST, "attention")
    yield Block(PAGE, decode_step_table(), TPOT, "steps")
    yield Block(SPEED, models(), TPOT, "models")
    yield Block(PAGE, odd_windows(), f"{H2O}, {ODD}", "odd-windows")
    yield Block(PAGE, prefill(), PREFILL, "prefill")
    yield Block(PAGE, batches(), f"{FOLDER}/whole/batch_*.json", "batches")
    yield Block(SPEED, throughput(), f"{FOLDER}/whole/batch_*.json, {h200.logquant_setting('*')}", "throughput")
    yield Block(PAGE, products(), PRODUCTS, "products")
    yield Block(f"{HOUSE}/README.md", house(), f"{HOUSE}/tpot_*.json", "steps")
    yield from speculation.speculation_blocks()
    yield cells_block()


def attention_point_table() -> str:
    """Return the table of one layer's attention on two machines; ± where a time's spread is more than 2.5 %."""
    body = []
    for label, gate, at in POINTS:
        measured = [row for file in (FIRST, SECOND) for row in h200.attention_rows(file, *at)]
        cells = [["-"] * 3] * (2 - len(measured))
        for row in measured:
            half = (row["p90"] - row["p10"]) / 2
            time = three(row["us"]) + (f" ± {half:.0f}" if half > 0.025 * row["us"] else "")
            cells.append([time, f"{share(row):.0f}", three(row["best_us"])])
        times, shares, best = (" / ".join(column) for column in zip(*cells, strict=True))
        faster = [f"{row['best_us'] / row['us']:.1f}" for row in measured]
        ratio = " / ".join(faster if label.startswith("int2") else faster[:1])
        body.append([label, str(gate), times, f"{shares} %", best, ratio])
    return grid("| point | gate | CUDA kernel | share of the read ceiling | best bf16 | x |", body, "-")


def share(row: Row) -> float:
    """Return the share of the measured read bandwidth, in percent."""
    return float(100 * row["GB_s"] / row["ceiling_GB_s"])


def layers() -> str:
    """Return docs/speed.md's table of one layer's attention."""
    body = []
    for label, model, thousands in (
        ("32/32 heads, 4k tokens", "7b", 4),
        ("32/32 heads, 32k", "7b", 32),
        ("32/32 heads, 128k", "7b", 128),
        ("32/8 heads, 128k", "8b", 128),
    ):
        forms = ("int8", "int4_g32", "int4_g128", "int2_g128")
        measured = [one(h200.attention_rows(FIRST, model, 1, thousands, form)) for form in forms]
        cells = [f"{three(r['us'])} ({r['best_us'] / r['us']:.1f}x, {share(r):.0f}%)" for r in measured]
        body.append([label, three(measured[0]["best_us"]), *cells])
    head = "| µs (x over bf16, share of the read ceiling) | bf16 SDPA | int8 | int4, G 32 | int4, G 128 | int2, G 128 |"
    return grid(head, body)


def decode_step_table() -> str:
    """Return the table of decode steps of whole models."""
    body = []
    for label, setting in SETTINGS.items():
        cells = [label]
        for thousands, gate in zip((32, 128), GATES.get(label, ("-", "-")), strict=True):
            row = step(setting, thousands)
            ratio = f" ({100 * median(row) / median(step('fp16', thousands)):.1f} %)" if "%" in gate else ""
            cells += [gate, f"{median(row):.2f}{ratio}", f"{roof(row):.2f}"]
            cells += [f"{roof(row, 'expected_tpot_s'):.2f}", f"{row['over_used']:.3f}"]
        body.append(cells)
    head = "| setting | 32k: gate | ms | roof | expected | peak | 128k: gate | ms | roof | expected | peak |"
    return grid(head, body, "-")


def models() -> str:
    """Return docs/speed.md's table of decode steps."""
    names = (
        "fp16",
        "kivi int4, G 32",
        "kivi int4, G 128",
        "kivi int2, G 128",
        "logquant int2, W 64",
        "cocktail 10/30/60",
    )
    short, long = ([step(SETTINGS[name], thousands) for name in names] for thousands in (32, 128))
    body = [
        ["32k tokens", *(f"{median(row):.2f} ({roof(row):.2f})" for row in short)],
        ["128k", *(f"{median(row):.2f} ({roof(row):.2f})" for row in long)],
        ["peak while decoding at 128k, GiB", *(f"{row['peak']['decode'] / GIB:.1f}" for row in long)],
    ]
    return grid(f"| | {' | '.join(name.removesuffix(', W 64') for name in names)} |", body)


def odd_windows() -> str:
    """Return the table of H2O and of windows that fit no tile."""
    body = []
    for label, file, setting in (
        ("h2o, 20 % of the tokens", H2O, "h2o"),
        ("logquant as it comes, W = 42", ODD, "logquant"),
        ("logquant, W = 64", ODD, "logquant:window=64"),
    ):
        measured = [(median(row), 1e3 * row["tpot_s"]["p99"], roof(row)) for row in h200.odd_steps(file, setting)]
        body.append([label, *(f"{figure:.2f}" for figures in measured for figure in figures)])
    return grid("| setting | 32k: median | p99 | roof | 128k: median | p99 | roof |", body, "-")


def prefill() -> str:
    """Return the table of prefill beside stock transformers."""
    measured = benchmark_rows(PREFILL)
    stock = [one(measured, setting="fp16", context=thousands * KI) for thousands in (32, 128)]
    (short, first), (long, second) = ((row["stock_s"], row["stock_peak"] / GIB) for row in stock)
    body = [["stock", f"{short:.3f}", f"{first:.1f}", f"{long:.2f}", f"{second:.1f}"]]
    for label, setting in {
        "fp16": "fp16",
        "kivi int4, G 128": "kivi:int4_g128",
        "logquant int2, W 64": "logquant:int2_g128:window=64",
        "cocktail 10/30/60": "cocktail:split=[10,30,60],encoder=bm25",
    }.items():
        cells = [label]
        for row, digits in zip(some(measured, setting=setting), (3, 2), strict=False):
            ratio = 100 * row["over_stock"]
            search = f", search {row['search_s']:.2f}" if row["search_s"] else ""
            cells += [f"{row['seconds']:.{digits}f} ({ratio:.{1 if digits == 3 or ratio < 99.95 else 0}f} %){search}"]
            cells += [f"{row['peak'] / GIB:.1f}"]
        body.append([*cells, *["-"] * (5 - len(cells))])
    return grid("| 7B | 32k: s | peak, GiB | 128k: s | peak, GiB |", body, "-")


def batches() -> str:
    """Return the table of throughput by batch."""
    body = []
    for label, name in BATCHES.items():
        cells, unit = [label], " ms" if name == "fp16" else ""
        for length, shown in (("4k", (4, 16, 64)), ("8k", (4, 16))):
            file = f"{FOLDER}/whole/batch_{length}_{name}.json"
            done = {row["batch"]: row for row in h200.finished(file)}
            last = done[max(done)]
            speeds = [f"{done[batch]['tokens_per_s']:.0f}" if batch in done else "-" for batch in shown]
            cells += [" / ".join([*speeds, f"{last['tokens_per_s']:.0f}"]), f"{last['batch']} ({h200.refused(file)})"]
            cells += [f"{median(last):.1f}{unit}", f"{roof(last):.1f}"]
        body.append(cells)
    head = "| setting | 4k: tokens/s at 4 / 16 / 64 / largest | largest (oom) | TPOT there | roof "
    return grid(head + "| 8k: 4 / 16 / largest | largest (oom) | TPOT there | roof |", body, "-")


def throughput() -> str:
    """Return docs/speed.md's table of throughput."""

    def largest(file: str) -> str:
        row = h200.finished(file)[-1]
        return f"{row['tokens_per_s']:,.0f} ({row['batch']})"

    of_4k, of_8k = ([f"{FOLDER}/whole/batch_{k}_{name}.json" for name in BATCHES.values()] for k in ("4k", "8k"))
    more = f"{largest(h200.logquant_setting('logquant'))}: +{h200.gains()[0]:.0f} %, batch +{h200.gains()[1]:.0f} %"
    body = [
        ["7B, batch 16", *(f"{one(h200.finished(file), batch=16)['tokens_per_s']:.0f}" for file in of_4k)],
        ["7B, largest batch", *map(largest, of_4k)],
        ["... prompts of 8,192", *map(largest, of_8k)],
        ["8B, LogQuant's setting", largest(h200.logquant_setting("fp16")), "", more, ""],
    ]
    head = "| tokens per second (batch) | fp16 | kivi int4, G 128 | logquant int2 | cocktail 10/30/60 |"
    return grid(head, body)


def products() -> str:
    """Return the table of products of a matrix and a vector."""
    ceiling = load_result_json(PRODUCTS)["ceiling"]["GB_s"]
    body, shapes = [], list(dict.fromkeys((row["rows"], row["columns"]) for row in benchmark_rows(PRODUCTS)))
    for label, by in {
        "kernel": "kernel",
        "torch (cuBLAS)": "torch (library)",
        "`torch.compile`, tuned": "torch.compile, tuned",
    }.items():
        own = [some(benchmark_rows(PRODUCTS), by=by, rows=high, columns=wide)[0] for high, wide in shapes]
        body.append([label, *(f"{row['us']:.1f}" for row in own)])
        if by == "kernel":
            reached = [f"{100 * row['bytes'] / row['us'] / 1e3 / ceiling:.0f} %" for row in own]
            body.append([f"... of plain reads' {ceiling / 1e3:.2f} TB/s", *reached])
    return grid(f"| | {' | '.join(f'{high} x {wide}' for high, wide in shapes)} |", body, "-")


def house() -> str:
    """Return the table of steps before and after the redesign of the packages, two runs each."""
    runs = [benchmark_rows(f"{HOUSE}/tpot_{name}.json") for name in ("before_1", "before_2", "after_1", "after_2")]
    body = []
    for row in runs[0]:
        first, second, third, fourth = (median(one(run, setting=row["setting"], prompt=row["prompt"])) for run in runs)
        change = 100 * ((third + fourth) / (first + second) - 1)
        cells = [f"{first:.3f}, {second:.3f}", f"{third:.3f}, {fourth:.3f}", f"{change:+.2f} %"]
        body.append([row["setting"], f"{row['context'] // KI}k", *cells])
    return grid("| setting | tokens | before | after | after to before |", body)
