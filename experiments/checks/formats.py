"""Figures of results/formats and results/h200/formats in docs/."""

from __future__ import annotations

import math
from collections.abc import Iterator

from experiments.checks.h200_tables import share
from experiments.checks.rules import KI, Block, Rule, Text, range_text, spread, three
from experiments.formats import which
from experiments.formats.which import CODES, SOURCE, measured_tpot
from experiments.stored import Row, benchmark_rows, grid, load_result_json, one, some

LINES, CLAIMS = "results/formats/lines.json", "results/formats/claims.json"
FOLDER = "results/h200/formats"
KERNEL = f"{FOLDER}/kernel.json"
PAGE, METHODS, SPEED = which.PAGE, "docs/methods.md", "docs/speed.md"
ROTATION, KERNELS = "docs/rotation.md", "docs/kernels.md"
#: lines of docs/methods.md's table of TurboQuant: label, name, choice of exact tokens
TURBOQUANT = (
    ("`k8v4`", "TurboQuant k8v4", "own"),
    ("`4bit_nc`", "TurboQuant 4 bits", "own"),
    ("`k3v4_nc`", "TurboQuant k3v4", "own"),
    ("`3bit_nc`", "TurboQuant 3 bits", "own"),
    ("`k8v4`, all layers packed (`boundary=0`)", "TurboQuant k8v4", "open"),
    ("`4bit_nc`, all layers packed", "TurboQuant 4 bits", "open"),
    ("`k3v4_nc`, all layers packed", "TurboQuant k3v4", "open"),
    ("`3bit_nc`, all layers packed", "TurboQuant 3 bits", "open"),
    ("`4bit_nc`, all layers packed, `nc_at=none qjl=true`", "TurboQuant 4 bits, QJL", "open"),
)
#: points of the table of iq4_nl and Octave
CODE_POINTS = (
    ("32/8 heads, 8k", "8b", 8),
    ("32/8 heads, 32k", "8b", 32),
    ("32/8 heads, 128k", "8b", 128),
    ("32/32 heads, 128k", "7b", 128),
)
TABLES = ("iq4_nl", "octave_k3v4", "octave_k3v3", "octave_k3v3_compact")
#: what loses score because of its codes (e2m1)
COARSE = ("nvfp4 4over6", "nvfp4", "UltraQuant", "fp4_mx_block16")


def format_line(name: str, tail: str = "open") -> Row:
    """Return a line: a quantizer with one choice of exact tokens."""
    return one(load_result_json(LINES)["lines"], name=name, tail=tail)


def format_divergence(name: str, tail: str = "open") -> list[float]:
    """Return the mean KL divergence and its interval, in 0.0001 nats."""
    return [1e4 * format_line(name, tail)["kld"][key] for key in ("mean", "low", "high")]


def kld(name: str) -> str:
    """Return the same as text."""
    mean, low, high = format_divergence(name)
    return f"{mean} ({low} to {high})"


def lost(name: str) -> str:
    """Return the points of score that a line has less than fp16."""
    return spread(format_line(name)["vs_fp16"], factor=-100)


def claim(first: str, second: str) -> Row:
    """Return the paired comparison of two quantizers."""
    return one(load_result_json(CLAIMS), better=f"{first} | open", worse=f"{second} | open")


def apart(first: str, second: str, form: str = "{} ({} to {})") -> str:
    """Return the size of a paired difference of KL divergences and its interval as text, in 0.0001 nats."""
    entry = claim(first, second)["kld"]["kld_mean"]
    low, middle, high = sorted(abs(1e4 * entry[key]) for key in ("low", "diff", "high"))
    return form.format(middle, low, high)


def beside_int4(key: str, form: str, *models: str) -> list[float]:
    """Return the smallest and the largest ratio of a format's figure to ``int4_g128``'s at the same point."""
    base = {(row["model"], row["context"]): row[key] for row in some(benchmark_rows(KERNEL), format="int4_g128")}
    own = [row for row in some(benchmark_rows(KERNEL), format=form) if row["model"] in (models or ("7b", "8b"))]
    ratios = [row[key] / base[row["model"], row["context"]] for row in own]
    return [min(ratios), max(ratios)]


def format_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block(PAGE, which.which_format_table(), f"{LINES}, {FOLDER}", "formats")
    yield Block(METHODS, _turboquant(), LINES, "turboquant")
    yield Block(f"{FOLDER}/README.md", _table_formats(), CODES, "codes")
    for sentences in (_closeness, _bits, _h200_time_texts, _table_format_texts):
        yield from sentences()


def _turboquant() -> str:
    """Return the table of TurboQuant's settings."""
    body = []
    for label, name, tail in TURBOQUANT:
        row, (mean, low, high) = format_line(name, tail), format_divergence(name, tail)
        digits = max(1 - math.floor(math.log10(mean)), 0)
        cell = f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
        score = f"{100 * row['vs_fp16']['diff'] or 0.0:+.1f} ± {100 * row['vs_fp16']['stderr']:.1f}"
        body.append([label, f"{row['bits']:.2f}", cell, f"{100 * row['same_top']['share']:.1f} %", score])
    return grid("| TurboQuant | bits | KL divergence, mean | same first choice | score, points |", body)


def _closeness() -> list[Text]:
    """Return what docs/which-format.md says of formats that differ from fp16 in KL divergence."""
    fp8, int8, q8 = "fp8", "int8 per token", "q8_0, rotated"
    plain, turned = "int4 per token", "int4 per token, rotated"
    k4v2, three, four = "KVarN k4v2", "TurboQuant 3 bits", "TurboQuant 4 bits"
    times = {name: 1e3 * seconds for name, seconds in measured_tpot().items()}
    for name in (fp8, int8, q8):
        assert -format_line(name)["vs_fp16"]["diff"] <= 1.96 * format_line(name)["vs_fp16"]["stderr"], (
            f"{LINES}: {name} loses score"
        )
    entry = claim("q4_0, rotated", "q4_0, not rotated")["kld"]["kld_mean"]
    assert entry["low"] < 0 < entry["high"], f"{CLAIMS}: a gain by rotation can be seen"
    alike = ("kivi int4 G32", "kivi int4 G128", "q4_0, rotated", four, "KVarN k4v4", turned)
    means, lows, highs = zip(*map(format_divergence, alike), strict=True)
    assert max(lows) < min(means) and max(means) < min(highs), f"{LINES}: not within each other's intervals"
    ordered = sorted((*alike, "vLLM int4 per token"), key=times.__getitem__)
    assert (ordered[0], ordered[-1]) == ("KVarN k4v4", four), f"{SOURCE}: the shortest and the longest steps"
    for other in (three, four):
        assert claim(k4v2, other)["kld"]["kld_mean"]["low"] > 0 and times[k4v2] < times[other], CLAIMS
    three_bits, four_bits = (apart(k4v2, other, "{}, {} to {}") for other in (three, four))
    before, after = format_divergence(plain)[0], format_divergence(turned)[0]
    return [
        Text(PAGE, SOURCE, f"Their steps take {times[int8]} and {times[q8]} ms, fp8's {times[fp8]}."),
        Text(PAGE, SOURCE, f"hadamard`, {times[turned] - times[plain]} ms a step at 7B"),
        Text(PAGE, LINES, f"is {kld(fp8)} where int8's is {kld(int8)} and q8_0's {kld(q8)}."),
        Text(PAGE, LINES, f"of int4 per token from {before} to {after}, by {apart(turned, plain)}."),
        Text(
            PAGE, LINES, f"intervals, with {range_text(format_line(name)['bits'] for name in alike)} bits when scored"
        ),
        Text(PAGE, LINES, f"q4_0, both rotated, by {apart('iq4_nl, rotated', 'q4_0, rotated')}."),
        Text(PAGE, CLAIMS, f"than TurboQuant's 3 bits (by {three_bits}) and 4 bits (by {four_bits})"),
    ]


def _bits() -> list[Text]:
    """Return what docs/which-format.md says of scores."""
    content, table = load_result_json(LINES), which.which_format_table()
    two = {row["name"] for row in content["lines"] if "int2" in row["name"] or "k2v2" in row["name"]}
    least = min(-100 * row["vs_fp16"]["diff"] for row in content["lines"] if row["name"] in two)
    named = {*two, *COARSE, "TurboQuant 4 bits, QJL", "KVarN k4v2"}
    fours = {row["name"] for row in some(content["lines"], tail="open") if 4 <= row["bits"] < 6} - named
    most = max(-100 * format_line(name)["vs_fp16"]["diff"] for name in fours if f"| {name} |" in table)
    sketch = spread(claim("TurboQuant 4 bits, QJL", "TurboQuant 4 bits")["score"], factor=-100)
    balance = spread(claim("KVarN k2v2", "k2v2, rotated, not balanced")["score"], factor=-100)
    oscar, own = format_line("OSCAR int2"), format_line("OSCAR int2", "own")
    wide = [format_line(name, "wide") for name in ("kivi int2 G32", "KVarN k2v2", "kivi int2 G128")]
    right = [100 * row["score"]["score"] for row in (oscar, own, *wide)]
    over6, nvfp4, ultra, mx = map(lost, COARSE)
    return [
        Text(PAGE, LINES, f"scored; {content['n']} prompts of 872 to 1,000"),
        Text(PAGE, LINES, f"answers to {content['prompts']} of them"),
        Text(PAGE, LINES, f"values every format loses at least {least} points"),
        Text(PAGE, LINES, f"`nvfp4_4over6` {over6} points, `nvfp4` {nvfp4}, UltraQuant {ultra} and SGLang's"),
        Text(PAGE, LINES, f"SGLang's `fp4_mx_block16` {mx}, where the other formats of 4 bits"),
        Text(PAGE, LINES, f"formats of 4 bits in the table lose {most} or less"),
        Text(PAGE, LINES, f"with 3. It loses {lost('TurboQuant 3 bits')} points"),
        Text(PAGE, LINES, f"values in 2) loses {lost('KVarN k4v2')}; with"),
        Text(PAGE, LINES, f"; with {format_line('KVarN k4v2')['bits']} bits when scored, because"),
        Text(PAGE, LINES, f"exact tokens answers {right[0]} % of the questions; with its own 320, {right[1]} %"),
        Text(PAGE, LINES, f"groups of 32 answers {right[2]} %, KVarN {right[3]} % and KIVI"),
        Text(PAGE, LINES, f"and KIVI in groups of 128 {right[4]} %; all"),
        Text(PAGE, LINES, f"all four caches then hold {range_text(row['bits'] for row in (own, *wide))} bits"),
        Text(PAGE, CLAIMS, f"not in the table, scores {sketch} points less"),
        Text(PAGE, CLAIMS, f"its tiles score {balance} points more"),
    ]


def _h200_time_texts() -> list[Text]:
    """Return what several pages say of times on an H200."""
    at = [
        one(benchmark_rows(KERNEL), model="7b", context=128 * KI, format=form)
        for form in ("turboquant_4bit", "int4_g128")
    ]
    ratios = {form: beside_int4("per_byte", form) for form in ("nvfp4", "turboquant_4bit", "kvarn_k4v4")}
    nvfp4, turboquant, _ = ([100 * (ratio - 1) for ratio in of_form] for of_form in ratios.values())
    k4v4, k4v2, seven_b = ratios["kvarn_k4v4"], beside_int4("us", "kvarn_k4v2"), beside_int4("per_byte", "nvfp4", "7b")
    share, turned = 100 * beside_int4("bytes", "kvarn_k4v2")[0], "rotation.key=hadamard:rotation.value=hadamard"

    def longer(file: str, setting: str) -> float:
        steps = benchmark_rows(f"{FOLDER}/{file}.json")
        plain, with_it = (one(steps, setting=name)["tpot_s"]["median"] for name in (setting, f"{setting}:{turned}"))
        return float(1e3 * (with_it - plain))

    seven, eight = longer("tpot_7b", "kivi:int4_token:residual=1"), longer("tpot_8b", "kivi:int4_g128")
    return [
        Text(PAGE, KERNEL, f"takes {at[0]['us']} µs where int4 in groups of 128 takes {at[1]['us']} ("),
        Text(SPEED, KERNEL, f"nvfp4 {range_text(nvfp4)} % longer, and TurboQuant"),
        Text(SPEED, KERNEL, f"looks up its levels, {range_text(turboquant)} % (4 bits)."),
        Text(KERNELS, KERNEL, f"KVarN's 4-bit tiles take {range_text(k4v4)} times the time per byte of `int4_g128`"),
        Text(KERNELS, KERNEL, f"and with 2-bit values ({share} % of the bytes) {range_text(k4v2)} of its time"),
        Text(KERNELS, KERNEL, f"the kernel takes {range_text(seven_b)} times the time per byte of `int4_g128`"),
        Text(ROTATION, FOLDER, f"takes {seven} ms longer at 7B (32k tokens; {1e3 * seven / 32} µs a layer)"),
        Text(ROTATION, FOLDER, f"and {eight} ms at 8B (128k tokens; {1e3 * eight / 32} µs)"),
    ]


def _table_formats() -> str:
    """Return the table of attention over iq4_nl and Octave beside other formats."""
    points = [some(benchmark_rows(CODES), model=model, context=thousands * KI) for _, model, thousands in CODE_POINTS]
    shape = which.SHAPE  # of the last point
    body = [["bf16, fastest SDPA (cuDNN)", "16", *(three(rows[0]["best_us"]) for rows in points)]]
    for name in dict.fromkeys(row["format"] for row in points[-1]):
        own = [one(rows, format=name) for rows in points]
        bits = 4 * own[-1]["bytes"] / (shape.heads * shape.channels * shape.tokens)  # of keys and of values
        shown = [f"{three(row['us'])} · {share(row):.0f} % · {row['per_byte']:.2f}" for row in own]
        body.append([f"`{name}`", f"{bits:.3f}".rstrip("0").rstrip("."), *shown])
    return grid(f"| format | bits per element | {' | '.join(label for label, _, _ in CODE_POINTS)} |", body)


def _table_format_texts() -> list[Text]:
    """Return what several pages say of attention over iq4_nl and Octave on an H200."""
    rows, content = benchmark_rows(CODES), load_result_json(CODES)
    own = [row for row in rows if row["format"] in TABLES]
    longest = [row for row in own if row["context"] == 128 * KI]
    checked = [row["error"] for row in (*content["values"], *rows)]
    replays = max((row["p90"] - row["p10"]) / 2 / row["us"] for row in longest)
    assert all(row["ok"] for row in (*content["values"], *content["store"])), f"{CODES}: wrong values"
    assert not any(row["different numbers"] for row in content["store"]), f"{CODES}: packed otherwise than by torch"

    def at(form: str, model: str) -> float:
        return float(one(rows, format=form, model=model, context=128 * KI)["us"])

    iq4, q4, base = ([at(form, model) for model in ("8b", "7b")] for form in ("iq4_nl", "q4_0", "int4_g128"))
    bf16 = [one(rows, format="iq4_nl", model=model, context=128 * KI)["best_us"] for model in ("8b", "7b")]
    per_byte = [row["per_byte"] for row in own]
    faster = [row["best_us"] / row["us"] for row in longest]
    readme = f"{FOLDER}/README.md"
    return [
        Text(readme, CODES, f"Plain reads reached {content['ceiling']['GB_s']} GB/s"),
        Text(readme, CODES, f"({len(checked)} lines) is {max(checked)} at most"),
        Text(readme, CODES, f"at most {100 * replays} % of the median"),
        Text(readme, CODES, f"at 128k tokens they reach {range_text(map(share, longest))} % of plain reads"),
        Text(readme, CODES, f"are {range_text(faster)} times as fast as bf16 there"),
        Text(readme, CODES, f"`q4_0` takes {q4[0]} and {q4[1]} µs where `iq4_nl` takes {iq4[0]} and {iq4[1]}"),
        Text(KERNELS, CODES, f"they take {range_text(per_byte)} times the time per byte of `int4_g128`"),
        Text(SPEED, CODES, f"in keys and values, {range_text(100 * (ratio - 1) for ratio in per_byte)} %"),
        Text(PAGE, CODES, f"takes {iq4[1]} µs where q4_0's takes {q4[1]} and bf16's {bf16[1]}"),
        Text(PAGE, CODES, f"in which int4 in groups of 128 took {base[1]}, and"),
    ]
