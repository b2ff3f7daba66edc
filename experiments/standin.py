"""Generated records in each benchmark's own layout, to try an item's format where the data is missing.

Their texts mean nothing and neither do scores on them: tables of them are marked "format only".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.item import Column
from experiments.plan import Plan

#: records of a file
RECORDS = 4
#: tokens that a word takes, about, with a small vocabulary
TOKENS_PER_WORD = 2
_WORDS = "the old river house stood near a quiet road where people walked home late in winter with their bread".split()


def text(rng: random.Random, words: int) -> str:
    """Return sentences of `words` words."""
    picked = [rng.choice(_WORDS) for _ in range(words)]
    return " ".join(f"{word}." if n % 12 == 11 else word for n, word in enumerate(picked))


def longbench(task: str, rng: random.Random, words: int) -> Mapping[str, Any]:
    """Return a record of LongBench (its README, section "Data format")."""
    classes = ["place", "person", "number"] if task in ("trec", "lsht") else None
    answer = classes[0] if classes else text(rng, 4)
    context = text(rng, words)
    if task.startswith("passage_"):
        context, answer = f"Paragraph 1: {context}", "Paragraph 1" if "retrieval" in task else "1"
    return {
        "input": text(rng, 8),
        "context": context,
        "answers": [answer],
        "length": words,
        "dataset": task,
        "language": "en",
        "all_classes": classes,
        "_id": f"{rng.getrandbits(128):032x}",
    }


#: choice of ``conf/dataset`` -> a record of its layout
LAYOUTS: dict[str, Callable[[str, random.Random, int], Mapping[str, Any]]] = {
    "longbench_cocktail": longbench,
    "longbench_logquant": longbench,
    "longbench_en": longbench,
    "longbench": longbench,
}


def overrides(column: Column, plan: Plan, context: int) -> list[str]:
    """Write a column's stand-in file unless it exists, and return the override that reads it."""
    words = min(600, max(32, context // 4 // TOKENS_PER_WORD))
    folder = plan.runs / "standin" / f"{column.data}-{words}"
    path = folder / f"{column.task}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make = LAYOUTS[column.data]
        rows = [make(column.task, random.Random(f"{path.name} {n}"), words) for n in range(RECORDS)]
        partial: Path = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(path)
    return [f"dataset.path={path}"]
