"""Rules for the tables of results/h200, and for those of docs/speed.md that show the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Row, Rule, Text, Value, load, one

PAGE, SPEED = "results/h200/README.md", "docs/speed.md"
FIRST, SECOND = "results/h200/kernel_both.json", "results/h200/kernel.json"
QUANTIZE, TPOT = "results/h200/quantize.json", "results/h200/whole/tpot.json"
PREFILL, PRODUCTS = "results/h200/whole/prefill.json", "results/h200/products.json"
KI = 1024
#: names of the settings in the tables, and in the files
SETTINGS = {
    "fp16": "fp16",
    "kivi int4, G 128": "kivi:int4_g128",
    "kivi int4, G 32": "kivi:int4",
    "kivi int2, G 128": "kivi:int2_g128",
    "logquant int2, W 64": "logquant:int2_g128:window=64,reserved=192",
    "cocktail 10/30/60": "cocktail:split=10/30/60,encoder=bm25",
    "atom int4": "atom",
    "streamingllm, 2048": "streamingllm",
    "logquant int2 as it comes, W 42": "logquant",
}
BATCHES = {
    "fp16": "fp16",
    "kivi": "kivi int4, G 128",
    "logquant": "logquant int2, W 64",
    "cocktail": "cocktail 10/30/60",
}


def attention(file: str, model: str, batch: int, thousands: int, form: str, new: int = 1) -> dict[str, Any] | None:
    """Return what the CUDA kernel did at one point; None if the file does not have it."""
    wanted = {"model": model, "batch": batch, "context": thousands * KI, "q_len": new, "format": form, "path": "cuda"}
    chosen = [row for row in load(file)["rows"] if all(row[key] == value for key, value in wanted.items())]
    return chosen[0] if chosen else None


def share(row: dict[str, Any]) -> float:
    """Return the share of the measured read bandwidth, in percent."""
    return float(100 * row["GB_s"] / row["ceiling_GB_s"])


def times(row: dict[str, Any]) -> float:
    """Return the speed-up over the fastest SDPA back end."""
    return float(row["best_us"] / row["us"])


def step(setting: str, thousands: int) -> dict[str, Any]:
    """Return the decode steps of a whole model."""
    return one(load(TPOT)["rows"], setting=setting, context=thousands * KI)


def median(row: dict[str, Any]) -> float:
    """Return a step's median in milliseconds."""
    return float(1e3 * row["tpot_s"]["median"])


def roof(row: dict[str, Any], key: str = "tpot_s") -> float:
    """Return the roofline's time of a step in milliseconds; ``expected_tpot_s``: with the overhead of kernels."""
    return float(1e3 * row["predicted"][key])


def batches(length: str, name: str) -> list[dict[str, Any]]:
    """Return the points of one setting in the order of the batch, those that ran out of memory at the end."""
    rows = load(f"results/h200/whole/batch_{length}_{name}.json")["rows"]
    return sorted(rows, key=lambda row: (row["status"] != "ok", row["batch"]))


def rules() -> Iterator[Rule]:
    """Yield the rules of results/h200 and of the same figures in docs/speed.md."""
    yield from _attention()
    yield from _packing()
    yield from _steps()
    yield from _prefill()
    yield from _batches()
    yield from _products()
    yield from _house()


def _attention() -> Iterator[Rule]:
    head = "| point | gate | CUDA kernel |"
    int8, int2 = "| int8 (two nibbles), 7B B1 32k |", "| int2 G128, 7B B1 128k |"
    points = (
        (head, "int4 G128, 7B B1 4k", 12, "7b", 1, 4, "int4_g128", 1),
        (head, "... 32k", 41, "7b", 1, 32, "int4_g128", 1),
        (head, "... 128k", 140, "7b", 1, 128, "int4_g128", 1),
        (head, "... 7B B8 32k", 265, "7b", 8, 32, "int4_g128", 1),
        (head, "... 8B B1 128k", 45, "8b", 1, 128, "int4_g128", 1),
        (head, "... 8B B16 32k", 140, "8b", 16, 32, "int4_g128", 1),
        (head, "int4 K G32 V G32, 7B B1 128k", 172, "7b", 1, 128, "int4_g32", 1),
        (head, "int8 (two nibbles), 7B B1 32k", 75, "7b", 1, 32, "int8", 1),
        (int8, "... 128k", 262, "7b", 1, 128, "int8", 1),
        (head, "... 32k, 5 new tokens", 75, "7b", 1, 32, "int8", 5),
        (head, "int2 G128, 7B B1 128k", 98, "7b", 1, 128, "int2_g128", 1),
        (int2, "... 7B B8 32k", 185, "7b", 8, 32, "int2_g128", 1),
        (head, "int8, 8B B1 128k, 5 new tokens (20 rows)", 145, "8b", 1, 128, "int8", 5),
    )
    for after, label, gate, *at in points:
        rows = [row for file in (FIRST, SECOND) if (row := attention(file, *at)) is not None]  # type: ignore[arg-type]
        spreads = [row["us"] if (row["p90"] - row["p10"]) / 2 <= 0.025 * row["us"] else None for row in rows]
        micro: list[Value] = []
        for row, steady in zip(rows, spreads, strict=True):
            micro += [row["us"]] if steady is not None else [row["us"], (row["p90"] - row["p10"]) / 2]
        ups = [times(row) for row in rows]
        shown = ups if label.startswith("int2") else ups[:1]
        values = [gate, *micro, *map(share, rows), *(row["best_us"] for row in rows), *shown]
        yield Row(PAGE, after, label, values, f"{FIRST}, {SECOND}")
    for label, model, thousands in (
        ("32/32 heads, 4k tokens", "7b", 4),
        ("32/32 heads, 32k", "7b", 32),
        ("32/32 heads, 128k", "7b", 128),
        ("32/8 heads, 128k", "8b", 128),
    ):
        rows = [attention(FIRST, model, 1, thousands, form) for form in ("int8", "int4_g32", "int4_g128", "int2_g128")]
        measured = [row for row in rows if row is not None]
        values = [measured[0]["best_us"], *(x for row in measured for x in (row["us"], times(row), share(row)))]
        yield Row(SPEED, "", label, values, FIRST)


def _packing() -> Iterator[Rule]:
    def milli(form: str, what: str) -> float:
        rows = load(QUANTIZE)["rows"]
        return float(one(rows, model="7b", context=32 * KI, format=form, what=what)["us"] / 1e3)

    grouped, hqq = milli("int4_g128", "kernel"), milli("int4", "hqq 4-bit")
    quanto, plain = milli("int4", "quanto 4-bit"), milli("int4_g128", "torch's way")
    values = [grouped, milli("int4_g32", "kernel"), milli("int8", "kernel"), quanto, hqq, plain]
    pattern = "int4 G128 {} ms, int4 G32 {}, int8 {} (quanto {} ms, hqq {} ms, plain torch {} ms)"
    yield Text(PAGE, pattern, values, QUANTIZE)
    yield Text(SPEED, "a 7B layer takes {} ms (quanto {}, hqq {})", [grouped, quanto, hqq], QUANTIZE)
    flushes = [row["gpu_us"] for row in load(QUANTIZE)["flushes"] if row["model"] == "7b"]
    ends = [min(flushes), max(flushes)]
    yield Text(SPEED, "takes {} to {} µs at any length", ends, QUANTIZE)
    yield Text(PAGE, "The flush while decoding: {} (int4 G128, 128 keys) to {} microseconds", ends, QUANTIZE)


def _steps() -> Iterator[Rule]:
    head = "| setting | 32k: gate | ms |"
    full = {thousands: median(step("fp16", thousands)) for thousands in (32, 128)}
    gates: dict[str, tuple[Value, ...]] = {
        "fp16": (8.5, 19.5),
        "kivi int4, G 128": (5.6, 8.8),
        "kivi int4, G 32": (5.9, 9.5),
        "kivi int2, G 128": (5.3,),
        "logquant int2, W 64": (5.3,),
    }
    for label, setting in SETTINGS.items():
        values: list[Value] = []
        for number, thousands in enumerate((32, 128)):
            row = step(setting, thousands)
            cells = [median(row), roof(row), roof(row, "expected_tpot_s"), row["over_used"]]
            if setting.startswith("cocktail"):  # its gate is a share of fp16
                gate: list[Value] = [70] if thousands == 32 else [52]
                cells[1:1] = [100 * median(row) / full[thousands]]
            else:
                gate = [gates[label][number]] if number < len(gates.get(label, ())) else []
            values += [*gate, *cells]
        yield Row(PAGE, head, label, values, TPOT)
    names = ("fp16", "kivi int4, G 32", "kivi int4, G 128", "kivi int2, G 128", "logquant int2, W 64")
    settings = [SETTINGS[name] for name in (*names, "cocktail 10/30/60")]
    for label, thousands in (("32k tokens", 32), ("128k", 128)):
        values = [x for name in settings for x in (median(step(name, thousands)), roof(step(name, thousands)))]
        yield Row(SPEED, "", label, values, TPOT)
    peaks = [step(name, 128)["peak"]["decode"] / 2**30 for name in settings]
    yield Row(SPEED, "", "peak while decoding at 128k, GiB", peaks, TPOT)
    static = "results/h200/whole/tpot_static.json"
    compiled = median(one(load(static)["rows"], setting="static-compiled"))
    yield Text(SPEED, "StaticCache with `torch.compile` takes {} ms at 32k", [compiled], static)
    values = [compiled, full[32], compiled / full[32]]
    yield Text(PAGE, '`torch.compile(mode="reduce-overhead")` {} ms, fp16 {}: {} times as fast', values, static)
    yield from _odd_windows()
    worst = step(SETTINGS["kivi int2, G 128"], 128)
    over = [100 * (median(worst) / roof(worst, "expected_tpot_s") - 1)]
    yield Text(SPEED, "but for int2 at 128k ({} %)", over, TPOT)
    yield Text(PAGE, "the other one, int2 at 128k, is at {} %", over, TPOT)
    drafts = [step("quantspec:gamma=4", thousands) for thousands in (32, 128)]
    shares = [row["speculation"] for row in drafts] if "speculation" in drafts[0] else []
    rounds = [row["decode_s"] * 1e3 / speculation["rounds"] for row, speculation in zip(drafts, shares, strict=False)]
    if rounds:
        yield Text(PAGE, "that is {} and {} ms for a round of four drafts", rounds, TPOT)
    yield Text(PAGE, "{} ms a token at 32k and {} at 128k", [median(row) for row in drafts], TPOT)
    later = "results/h200/whole/tpot_later.json"
    values = [median(row) for row in load(later)["rows"]]
    pattern = "fp16 {}, kivi int4 G 128 {}, kivi int2 {}, logquant int2 W 64 {}, cocktail 10/30/60 {} ms."
    yield Text(PAGE, pattern, values, later)


def _odd_windows() -> Iterator[Rule]:
    names = {
        "h2o, 20 % of the tokens": ("h2o", "h2o"),
        "logquant as it comes, W = 42": ("logquant42", "logquant"),
        "logquant, W = 64": ("logquant42", "logquant:window=64"),
    }
    shown = {}
    for label, (folder, setting) in names.items():
        file = f"results/h200/{folder}/tpot.json"
        rows = [one(load(file)["rows"], setting=setting, prompt=thousands * KI) for thousands in (32, 128)]
        shown[setting] = [median(row) for row in rows]
        values = [x for row in rows for x in (median(row), 1e3 * row["tpot_s"]["p99"], roof(row))]
        yield Row(PAGE, "setting | 32k: median", label, values, file)
    odd, even = "results/h200/logquant42/tpot.json", shown["logquant:window=64"]
    yield Text(SPEED, "whose groups fit no tile, it takes {} and {} ms", shown["logquant"], odd)
    yield Text(SPEED, "`window=64` took {} and {} in the same run", even, odd)
    file = "results/h200/h2o/tpot.json"
    yield Text(SPEED, "which keeps a fifth of the tokens, takes {} and {} ms", shown["h2o"], file)
    means = [1e3 * row["tpot_s"]["mean"] for row in load(file)["rows"]]
    yield Text(PAGE, "of all steps is {} and {})", means, file)
    file = "results/h200/logquant42/attention.json"
    points = [row for row in load(file) if "us" in row and row["bits"] == 2]
    times = [one(points, win=win, T=t, heads=32)["us"] for win in (42, 64) for t in (32 * KI, 128 * KI)]
    yield Text(PAGE, "meets: {} microseconds a layer at 32k and {} at 128k, W = 64: {} and {} (", times, file)


def _prefill() -> Iterator[Rule]:
    rows = load(PREFILL)["rows"]
    names = {
        "fp16": "fp16",
        "kivi int4, G 128": "kivi:int4_g128",
        "logquant int2, W 64": "logquant:int2_g128:window=64",
        "cocktail 10/30/60": "cocktail:split=[10,30,60],encoder=bm25",
    }
    head = "| 7B | 32k: s | peak, GiB |"
    stock = [one(rows, setting="fp16", context=thousands * KI) for thousands in (32, 128)]
    values = [x for row in stock for x in (row["stock_s"], row["stock_peak"] / 2**30)]
    yield Row(PAGE, head, "stock", values, PREFILL)
    for label, setting in names.items():
        cells: list[Value] = []
        for row in (row for row in rows if row["setting"] == setting):
            search = [row["search_s"]] if row["search_s"] else []
            cells += [row["seconds"], 100 * row["over_stock"], *search, row["peak"] / 2**30]
        yield Row(PAGE, head, label, cells, PREFILL)
    long = one(rows, setting="kivi:int4_g128", context=128 * KI)
    values = [long["seconds"], long["peak"] / 2**30, long["stock_peak"] / 2**30]
    yield Text(SPEED, "the time of stock transformers ({} s) at {} instead of {} GiB (kivi int4)", values, PREFILL)


def _batches() -> Iterator[Rule]:
    head = "| setting | 4k: tokens/s at 4 / 16 / 64 / largest |"
    of_speed: dict[str, list[Value]] = {"16": [], "4k": [], "8k": []}
    for name, label in BATCHES.items():
        cells: list[Value] = []
        for length in ("4k", "8k"):
            done = [row for row in batches(length, name) if row["status"] == "ok"]
            failed = next(row["batch"] for row in batches(length, name) if row["status"] == "oom")
            largest = done[-1]
            steps = [row["tokens_per_s"] for row in done if row["batch"] in (4, 16, 64)]
            cells += [*steps, largest["tokens_per_s"], largest["batch"], failed, median(largest), roof(largest)]
            of_speed[length] += [largest["tokens_per_s"], largest["batch"]]
            if length == "4k":
                of_speed["16"] += [one(done, batch=16)["tokens_per_s"]]
        yield Row(PAGE, head, label, cells, f"results/h200/whole/batch_4k_{name}.json, batch_8k_{name}.json")
    for label, key in (
        ("7B, batch 16", "16"),
        ("7B, largest batch", "4k"),
        ("... prompts of 8,192", "8k"),
    ):
        yield Row(SPEED, "", label, of_speed[key], "results/h200/whole/batch_*.json")
    files = [f"results/h200/whole/logquant_setting_{name}.json" for name in ("fp16", "logquant")]
    best = [max((r for r in load(file)["rows"] if r["status"] == "ok"), key=lambda r: r["batch"]) for file in files]
    gains = [100 * (best[1][key] / best[0][key] - 1) for key in ("tokens_per_s", "batch")]
    values = [x for row in best for x in (row["tokens_per_s"], row["batch"])] + gains
    yield Row(SPEED, "", "8B, LogQuant's setting", values, files[1])
    yield Text(PAGE, "So {} % throughput and {} % batch;", gains, files[1])
    points = [sorted((r for r in load(f)["rows"] if r["status"] == "ok"), key=lambda r: r["batch"]) for f in files]
    failed = [next(r["batch"] for r in load(file)["rows"] if r["status"] == "oom") for file in files]
    values = [x for key in ("tokens_per_s", "batch") for x in (row[key] for row in points[0])]
    yield Text(
        PAGE, "fp16 {} / {} / {} tokens/s at batch {} / {} / {}, out of memory at {};", [*values, failed[0]], files[0]
    )
    values = [x for key in ("tokens_per_s", "batch") for x in (row[key] for row in points[1])]
    pattern = "logquant int2 (W 64) {} / {} / {} at {} / {} / {}, out of memory at {}."
    yield Text(PAGE, pattern, [*values, failed[1]], files[1])


def _products() -> Iterator[Rule]:
    content = load(PRODUCTS)
    kernels = {
        "kernel": "kernel",
        "torch (cuBLAS)": "torch (library)",
        "`torch.compile`, tuned": "torch.compile, tuned",
    }
    head = "| | 12288 x 4096 | 4096 x 4096 |"
    for label, by in kernels.items():
        shapes: dict[tuple[int, int], dict[str, Any]] = {}
        for row in content["rows"]:
            if row["by"] == by:
                shapes.setdefault((row["rows"], row["columns"]), row)
        rows = list(shapes.values())
        yield Row(PAGE, head, label, [row["us"] for row in rows], PRODUCTS)
        if by == "kernel":
            reached = [row["bytes"] / row["us"] / 1e3 / content["ceiling"]["GB_s"] for row in rows]
            label = "... of plain reads' 4.55 TB/s"
            yield Row(PAGE, head, label, [100 * part for part in reached], PRODUCTS)
    yield Text(PAGE, "... of plain reads' {} TB/s", [content["ceiling"]["GB_s"] / 1e3], PRODUCTS)


def _house() -> Iterator[Rule]:
    document, folder = "results/h200/house/README.md", "results/h200/house"
    runs = [load(f"{folder}/tpot_{name}.json")["rows"] for name in ("before_1", "before_2", "after_1", "after_2")]
    for row in runs[0]:
        at = {"setting": row["setting"], "prompt": row["prompt"]}
        steps = [median(one(rows, **at)) for rows in runs]
        change = 100 * (sum(steps[2:]) / sum(steps[:2]) - 1)
        label = f"{row['setting']} | {row['context'] // KI}k"
        head = "| setting | tokens | before | after |"
        yield Row(document, head, label, [*steps, change], f"{folder}/tpot_*.json")
