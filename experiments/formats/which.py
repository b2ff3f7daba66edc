"""The table of docs/which-format.md: bits, time on an H200, and closeness to fp16 on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = "docs/which-format.md"
ROOT = Path(__file__).parents[2]
#: name in results/formats, name in results/h200/formats/kernel.json, setting in results/h200/formats/tpot_7b.json
FORMATS = (
    ("q8_0, rotated", "q8_0", None),
    ("int8 per token", "int8_per_token_head", None),
    ("fp8", "fp8", "engine:format=fp8"),
    ("kivi int4 G32", "int4_g32", None),
    ("kivi int4 G128", "int4_g128", "kivi:int4_g128"),
    ("int4 per token, rotated", None, None),
    ("int4 per token", None, None),
    ("vLLM int4 per token", "int4_per_token_head", "engine"),
    ("q4_0, rotated", "q4_0", "engine:format=q4_0"),
    ("nvfp4", "nvfp4", "engine:format=nvfp4"),
    ("TurboQuant 4 bits", "turboquant_4bit", "turboquant"),
    ("KVarN k4v4", "kvarn_k4v4", "kvarn:int4_g128"),
    ("OSCAR int2", "oscar_int2", None),
)
#: 7B at 128k tokens: number of KV elements of a layer and side
ELEMENTS = 32 * 131072 * 128


def read(path: str) -> Any:
    """Return a JSON file of the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def table() -> str:
    """Return the page's table."""
    lines = {line["name"]: line for line in read("results/formats/lines.json")["lines"] if line["tail"] == "open"}
    kernel = {row["format"]: row for row in read("results/h200/formats/kernel.json")["rows"] if seven(row)}
    steps = {row["setting"]: row["tpot_s"]["median"] for row in read("results/h200/formats/tpot_7b.json")["rows"]}
    best = min(row["best_us"] for row in kernel.values() if "best_us" in row)
    out = [
        "| format | bits | attention of a layer, 7B at 128k, µs | TPOT, 7B at 32k, ms "
        "| KL mean, 0.0001 nats | score, % |",
        "|:--|" + "--:|" * 5,
        f"| fp16 | 16 | {best:.0f} | {1e3 * steps['fp16']:.2f} | 0 | 99.8 |",
    ]
    for name, form, setting in FORMATS:
        line = lines[name]
        row = kernel.get(form or "")
        bits = "-" if row is None else f"{8 * (row['bytes'] - 2 * 2 * 32 * 128) / (2 * ELEMENTS):.3g}"
        kld = line["kld"]
        out.append(
            f"| {name} | {bits} | {'-' if row is None else format(row['us'], '.0f')} "
            f"| {'-' if setting is None else format(1e3 * steps[setting], '.2f')} "
            f"| {1e4 * kld['mean']:.3g} ({1e4 * kld['low']:.2g} to {1e4 * kld['high']:.2g}) "
            f"| {100 * line['score']['score']:.1f} |"
        )
    return "\n".join(out)


def seven(row: dict[str, Any]) -> bool:
    """Return True for a point of the 7B shape at 128k tokens."""
    return bool((row["model"], row["context"]) == ("7b", 131072) and "us" in row)


if __name__ == "__main__":
    print(table())
