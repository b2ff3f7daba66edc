"""Time per token of the table's quantizers: steps of a whole model of 7 billion parameters on an NVIDIA H200.

``python -m experiments.formats --settings`` prints the settings that ``python -m kvbench.bench tpot`` measured, or
should, for results/h200/formats/tpot_7b.json. Settings are matched by the methods that they describe, not by their
spelling: ``engine`` and ``engine:format=int4_per_token_head`` are the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from experiments.formats.grid import QUANTIZERS, line_key
from kvbench.config.setting import parse_setting

SOURCE = "results/h200/formats/tpot_7b.json"
ROOT = Path(__file__).parents[2]


def settings() -> dict[str, str]:
    """Return the setting to be timed for each quantizer by its name, fp16 first: with its authors' exact tokens."""
    timed = {quantizer.name: quantizer.to_time for quantizer in QUANTIZERS}
    return {"fp16": "fp16", **{name: setting for name, setting in timed.items() if setting is not None}}


def measured_tpot(root: Path = ROOT) -> dict[str, float]:
    """Return the time per token in seconds of each quantizer that was measured, by its name."""
    rows = json.loads((root / SOURCE).read_text(encoding="utf-8"))["rows"]
    times = [(parse_setting(row["setting"]).load(), row["tpot_s"]["median"]) for row in rows if row["status"] == "ok"]
    methods = {name: parse_setting(setting).load() for name, setting in settings().items()}
    return {name: seconds for name, method in methods.items() for timed, seconds in times if timed == method}


def step_milliseconds(root: Path = ROOT) -> dict[str, float]:
    """Return the time per token in milliseconds of the lines that have one, by the line's key.

    That is one line per quantizer: the one with the exact tokens of its authors.
    """
    own = {
        "fp16": line_key("fp16", "own"),
        **{part.name: line_key(part.name, next(iter(part.tails))) for part in QUANTIZERS},
    }
    return {own[name]: 1e3 * seconds for name, seconds in measured_tpot(root).items()}
