"""Which numbers a data set's keys take, and what they are where nobody sets them."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from kvbench.errors import ConfigError
from kvbench.util.schema import build

LENGTH, SEED = 2**24, 2**32 - 1
#: for each class, its numbers: default, smallest and largest value; None: no limit, or chosen from the data
LIMITS: dict[str, dict[str, tuple[Any, int, int | None]]] = {
    "continuation.Continuation": {
        "lengths": ((4096,), 16, LENGTH),
        "limit": (10, 1, None),
        "warm_up": (3, 0, 10_000),
        "per_document": (1, 1, None),
        "skip": (8000, 0, LENGTH),
        "max_new_tokens": (90, 1, LENGTH),
    },
    "efficiency.Efficiency": {
        "prompts": ((128, 512), 16, LENGTH),
        "batches": ((1, 2, 4), 1, 65536),
        "max_batch": (4096, 1, 65536),
        "bisect": (0, 0, 32),
        "new_tokens": (32, 2, LENGTH),
        "repeats": (3, 1, 1000),
        "untimed": (0, 0, 1000),
        "warm_up": (8, 2, LENGTH),
        "compare": (0, 0, LENGTH),
        "seed": (0, 0, SEED),
    },
    "fidelity.Fidelity": {
        "window": (768, 8, LENGTH),
        "prefill": (512, 1, LENGTH),
        "limit": (16, 1, None),
        "per_document": (2, 1, None),
        "skip": (0, 0, None),
        "probe": (0, 0, None),
    },
    "from_records.Records": {
        "shots": (0, 0, 64),
        "shots_seed": (1234, 0, SEED),
        "limit": (None, 1, None),
        "max_new_tokens": (64, 1, LENGTH),
    },
    "gsm8k.GSM8K": {
        "shots": (5, 0, 64),
        "shots_seed": (1234, 0, SEED),
        "limit": (None, 1, None),
        "max_new_tokens": (None, 1, LENGTH),
    },
    "longbench.LongBench": {
        "limit": (None, 1, None),
        "max_new_tokens": (None, 1, LENGTH),
        "prompt_limit": (None, 16, LENGTH),
    },
    "mini.task.Mini": {"limit": (100, 1, 10_000), "seed": (0, 0, SEED)},
    "openbookqa.OpenBookQA": {
        "shots": (5, 0, 64),
        "shots_seed": (1234, 0, SEED),
        "limit": (None, 1, None),
        "max_new_tokens": (8, 1, LENGTH),
    },
    "perplexity.Perplexity": {
        "window": (2048, 8, LENGTH),
        "stride": (None, 1, LENGTH),
        "limit": (None, 1, None),
        "per_document": (None, 1, None),
        "skip": (0, 0, None),
        "prefill": (0, 0, LENGTH),
        "chunk": ("auto", 1, None),
    },
    "ruler.task.Ruler": {"limit": (500, 1, 10_000), "seed": (42, 0, SEED)},
    "summaries.Summaries": {
        "lengths": ((8192,), 16, LENGTH),
        "limit": (10, 1, None),
        "warm_up": (3, 0, 10_000),
        "max_new_tokens": (90, 1, LENGTH),
    },
}


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    module, _, attribute = f"kvbench.tasks.{name}".rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    missing = {key for key, field in fields.items() if field.default is dataclasses.MISSING}
    needed = {key: "x" for key in missing if fields[key].default_factory is dataclasses.MISSING}
    for key, (default, least, most) in LIMITS[name].items():
        assert fields[key].default == default, key
        many = isinstance(default, tuple)
        for outside, said in ((least - 1, f"at least {least}"), (most and most + 1, f"at most {most}")):
            if outside is None:
                continue
            with pytest.raises(ConfigError, match=rf"dataset\.{key}\S*={outside}: must be {said}"):
                build(cls, {**needed, key: [outside] if many else outside}, "dataset")
