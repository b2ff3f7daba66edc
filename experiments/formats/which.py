"""The table of docs/which-format.md: bits, time on an H200, and closeness to fp16 on the bundled model.

Times per token are those of steps of a whole model of 7 billion parameters: ``python -m experiments.formats
--settings`` prints the settings that ``python -m kvbench.bench tpot`` measured, or should, for :data:`SOURCE`. Settings
are matched by the methods that they describe, not by their spelling: ``engine`` and
``engine:format=int4_per_token_head`` are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.formats.grid import QUANTIZERS, line_key
from experiments.stored import ROOT, benchmark_rows, content, load_result_json, markdown_table, some
from kvbench.config.setting import parse_setting
from kvbench.methods.byte_parts import Setting

PAGE, SOURCE = "docs/which-format.md", "results/h200/formats/tpot_7b.json"
LINES, KERNEL = "results/formats/lines.json", "results/h200/formats/kernel.json"
#: a later run, of the formats whose kernels came later and of some others
CODES, LATER = (f"results/h200/formats/{name}.json" for name in ("codes", "tpot_later"))
#: name in results/formats and name in :data:`KERNEL` and :data:`CODES`
FORMATS = (
    ("q8_0, rotated", "q8_0"),
    ("int8 per token", "int8_per_token_head"),
    ("fp8", "fp8"),
    ("fp8 per token", "fp8_per_token_head"),
    ("TurboQuant k8v4", None),
    ("q5_1, rotated", None),
    ("kivi int4 G32", "int4_g32"),
    ("kivi int4 G128", "int4_g128"),
    ("kvquant 4, 1% outliers", None),
    ("int4 per token, rotated", None),
    ("int4 per token", None),
    ("vLLM int4 per token", "int4_per_token_head"),
    ("q4_0, rotated", "q4_0"),
    ("nvfp4", "nvfp4"),
    ("nvfp4 4over6", None),
    ("fp4_mx_block16", None),
    ("UltraQuant", None),
    ("SAW-INT4", None),
    ("iq4_nl, rotated", "iq4_nl"),
    ("Octave k3v4", "octave_k3v4"),
    ("TurboQuant 4 bits", "turboquant_4bit"),
    ("KVarN k4v4", "kvarn_k4v4"),
    ("KVarN k4v2", "kvarn_k4v2"),
    ("TurboQuant k3v4", None),
    ("TurboQuant 3 bits", "turboquant_3bit"),
    ("kivi int2 G32", None),
    ("kivi int2 G128", None),
    ("KVarN k2v2", None),
    ("int2 per token, rotated", None),
    ("OSCAR int2", "oscar_int2"),
)
#: a layer in the middle of a 7B model, at 128k tokens
SHAPE = Setting(131072, 131072, query_heads=32, heads=32, channels=128, width=2, layer=16, layers=32)


def settings() -> dict[str, str]:
    """Return the setting to be timed for each quantizer by its name, fp16 first: with its authors' exact tokens."""
    timed = {quantizer.name: quantizer.to_time for quantizer in QUANTIZERS}
    return {"fp16": "fp16", **{name: setting for name, setting in timed.items() if setting is not None}}


def measured_tpot(root: Path = ROOT) -> dict[str, float]:
    """Return the time per token in seconds of each quantizer that was measured, by its name."""
    # a setting of both files has the time of the first run, in which most were measured
    timed = [
        row for file in (LATER, SOURCE) for row in some(content(root / file)["rows"], status="ok", prompt=32 * 2**10)
    ]
    times = [(parse_setting(row["setting"]).load(), row["tpot_s"]["median"]) for row in timed]
    methods = {name: parse_setting(setting).load() for name, setting in settings().items()}
    return {name: seconds for name, method in methods.items() for other, seconds in times if other == method}


def step_milliseconds(root: Path = ROOT) -> dict[str, float]:
    """Return the time per token in milliseconds of the lines that have one, by the line's key.

    That is one line per quantizer: the one with the exact tokens of its authors.
    """
    own = {
        "fp16": line_key("fp16", "own"),
        **{part.name: line_key(part.name, next(iter(part.tails))) for part in QUANTIZERS},
    }
    return {own[name]: 1e3 * seconds for name, seconds in measured_tpot(root).items()}


def which_format_table() -> str:
    """Return the page's table."""
    # kvquant has a line with its own exact tokens only, which are none
    lines = {
        line["name"]: line for tail in ("own", "open") for line in some(load_result_json(LINES)["lines"], tail=tail)
    }
    # a format of both files has the figure of the first run, in which most were measured
    both = [*benchmark_rows(CODES), *benchmark_rows(KERNEL)]
    kernel = {row["format"]: row for row in some(both, model="7b", context=SHAPE.tokens) if "us" in row}
    steps = measured_tpot()
    head = ["format", "bits, packed", "attention of a layer, 7B at 128k, µs", "TPOT, 7B at 32k, ms", "bits, scored"]
    head += ["KL mean, 0.0001 nats", "score, %"]
    fp16, best = lines["fp16"], min(row["best_us"] for row in kernel.values() if "best_us" in row)
    body = [["fp16", "16", f"{best:.0f}", f"{1e3 * steps['fp16']:.2f}", f"{fp16['bits']:.0f}", "0", scored(fp16)]]
    for name, form in FORMATS:
        line = lines[name]
        us = f"{kernel[form]['us']:.0f}" if form in kernel else "-"
        ms = f"{1e3 * steps[name]:.2f}" if name in steps else "-"
        kld = divergence_text(line["kld"])
        body.append([name, f"{bits(line['setting']):.3g}", us, ms, f"{line['bits']:.2f}", kld, scored(line)])
    return "\n".join(markdown_table(head, body))


def scored(line: Mapping[str, Any]) -> str:
    """Return the score of a line in percent."""
    return f"{100 * line['score']['score']:.1f}"


def divergence_text(kld: Mapping[str, float]) -> str:
    """Return a mean KL divergence and its interval in 0.0001 nats."""
    return "{} ({} to {})".format(*(digits(1e4 * kld[name]) for name in ("mean", "low", "high")))


def digits(x: float, sign: str = "") -> str:
    """Return a number with three significant digits, and without an exponent if it is 1000 or more."""
    return format(x, f"{sign}.0f" if abs(x) >= 999.5 else f"{sign}.3g")


def bits(setting: str, shape: Setting = SHAPE) -> float:
    """Return the bits per element of packed tokens: codes, scales and outliers, without tokens in full precision."""
    method, half = parse_setting(setting).load(), shape.tokens // 2
    # both lengths are multiples of every group, so the longer cache has more packed tokens and nothing else
    size = method.layer_bytes(shape).total - method.layer_bytes(replace(shape, tokens=half, prompt=half)).total
    return 8 * size / (2 * half * shape.heads * shape.channels)


if __name__ == "__main__":
    print(which_format_table())
