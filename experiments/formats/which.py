"""The table of docs/which-format.md: bits, time on an H200, and closeness to fp16 on the bundled model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from experiments.formats.report import divergence_text
from experiments.formats.tpot import ROOT, measured_tpot
from kvbench.config.setting import parse_setting
from kvbench.methods.byte_parts import Setting

PAGE = "docs/which-format.md"
#: name in results/formats and name in results/h200/formats/kernel.json
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
    ("iq4_nl, rotated", None),
    ("Octave k3v4", None),
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


def read_repository_json(path: str) -> Any:
    """Return a JSON file of the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def which_format_table() -> str:
    """Return the page's table."""
    rows = read_repository_json("results/formats/lines.json")["lines"]
    # kvquant has a line with its own exact tokens only, which are none
    lines = {line["name"]: line for tail in ("own", "open") for line in rows if line["tail"] == tail}
    kernel = {
        row["format"]: row for row in read_repository_json("results/h200/formats/kernel.json")["rows"] if seven(row)
    }
    steps = measured_tpot()
    best = min(row["best_us"] for row in kernel.values() if "best_us" in row)
    out = [
        "| format | bits, packed | attention of a layer, 7B at 128k, µs | TPOT, 7B at 32k, ms "
        "| bits, scored | KL mean, 0.0001 nats | score, % |",
        "|:--|" + "--:|" * 6,
    ]
    fp16 = lines["fp16"]
    out.append(
        f"| fp16 | 16 | {best:.0f} | {1e3 * steps['fp16']:.2f} | {fp16['bits']:.0f} | 0 "
        f"| {100 * fp16['score']['score']:.1f} |"
    )
    for name, form in FORMATS:
        line = lines[name]
        row = kernel.get(form or "")
        kld = line["kld"]
        out.append(
            f"| {name} | {bits(line['setting']):.3g} | {'-' if row is None else format(row['us'], '.0f')} "
            f"| {format(1e3 * steps[name], '.2f') if name in steps else '-'} "
            f"| {line['bits']:.2f} | {divergence_text(kld)} "
            f"| {100 * line['score']['score']:.1f} |"
        )
    return "\n".join(out)


def bits(setting: str) -> float:
    """Return the bits per element of packed tokens: codes, scales and outliers, without tokens in full precision."""
    method, half = parse_setting(setting).load(), SHAPE.tokens // 2
    # both lengths are multiples of every group, so the longer cache has more packed tokens and nothing else
    size = method.layer_bytes(SHAPE).total - method.layer_bytes(replace(SHAPE, tokens=half, prompt=half)).total
    return 8 * size / (2 * half * SHAPE.heads * SHAPE.channels)


def seven(row: dict[str, Any]) -> bool:
    """Return True for a point of the 7B shape at 128k tokens."""
    return bool((row["model"], row["context"]) == ("7b", 131072) and "us" in row)


if __name__ == "__main__":
    print(which_format_table())
