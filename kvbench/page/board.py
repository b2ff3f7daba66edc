"""The measured leaderboard of the bundled model that is part of the repository (`results/mini`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.metrics import intervals
from kvbench.page.numbers import cut, short, trimmed, whole
from kvbench.results import aggregate

#: file with the scores, below the folder of results
FILE = Path("mini/scores.json")
#: maximum number of settings
MOST = 60


def board(folder: Path) -> list[list[Any]]:
    """Return the settings of the leaderboard; empty if the folder of results does not have one.

    Each is ``[name, method, command, score, its reach, samples, difference from fp16, its reach, KV bytes, fp16's
    bytes, device]``. A reach is the distance to the farther end of the 95 % interval.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [_line(entry) for entry in content[:MOST]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _line(entry: dict[str, Any]) -> list[Any]:
    mean, pair, sizes = entry["mean"], entry["mean"].get("vs_fp16") or {}, entry["kv_bytes"]
    apart = aggregate.pair_interval(mean["score"], {**pair, "n": mean["n"]}) if pair else None
    numbers = (
        mean["score"],
        intervals.reach(mean["score"], aggregate.interval_of(mean)),
        mean.get("n"),
        pair.get("diff"),
        intervals.reach(pair.get("diff"), apart),
        round(sizes["used"]),
        round(sizes["fp16_equivalent"]),
    )
    device = ", ".join(map(str, entry.get("devices") or ()))
    keys = [key.partition("@") for key in entry["tasks"]]
    tasks, lengths = (",".join(dict.fromkeys(key[i] for key in keys)) for i in (0, 2))
    data = f"dataset=mini dataset.tasks=[{tasks}] dataset.lengths=[{lengths}] dataset.limit={mean['n'] // len(keys)}"
    command = whole(f"python -m kvbench {entry['command']} {data}", 300)
    return trimmed([cut(entry["name"], 80), cut(entry["family"], 40), command, *map(short, numbers), cut(device, 80)])
