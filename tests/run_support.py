"""A toy task, a random two-layer model and configurations for tests of runs: no data, no download, milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.base import Sample, Task

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
}

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": ({"_target_": "kvbench.methods.fp16.FP16", "takes": ["none"]}, {"name": "none"}),
    "kivi": (
        {
            "_target_": "kvbench.methods.kivi.Kivi",
            "takes": ["int2"],
            "residual": 32,
            "sinks": 0,
            "key_axis": "channel",
        },
        {
            "name": "int2",
            "key": {"bits": 2, "group_size": 32, "axis": "channel"},
            "value": {"bits": 2, "group_size": 32, "axis": "token"},
        },
    ),
}


@dataclass(kw_only=True)
class ToyTask(Task):
    """Prompts of growing length; the score grows with the share of lower-case letters."""

    name: str = "toy"
    limit: int = 4
    seed: int = 0
    new_tokens: int = 4
    words: int = 8
    truncation: str = "middle"
    scorer_version: int = 1
    version: int = 1

    def samples(self) -> Iterator[Sample]:
        for index in range(self.limit):
            task, length = ("first", None) if index % 2 == 0 else ("second", 64)
            context = " ".join(f"word{(index * 7 + k * 3 + self.seed) % 50}" for k in range(self.words + index % 5))
            prompt = f"Read: {context}\nQuestion {index}: what was said?\nAnswer:"
            yield Sample(
                id=f"{task}/{index}",
                task=task,
                length=length,
                prompt=prompt,
                context_span=(6, 6 + len(context)),
                query=f"Question {index}: what was said?",
                answers=(f" word{index}",),
                max_new_tokens=self.new_tokens,
                truncation=self.truncation,
            )

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "seed": self.seed, "new_tokens": self.new_tokens, "words": self.words}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        letters = sum(c.islower() for c in prediction) / max(len(prediction), 1)
        return {"score": (0.25 + letters / 4) * self.scorer_version, "length": float(len(prediction))}


def config(results_dir: Any, name: str = "kivi", /, **groups: dict[str, Any]) -> dict[str, Any]:
    """A composed configuration; `groups` override keys, for example ``dataset={"limit": 8}``."""
    made, quantizer = copy.deepcopy(METHODS[name])
    base: dict[str, Any] = {
        "model": {
            "name": "toy",
            "weights": "random",
            "dtype": "float32",
            "max_length": 512,
            "architecture": copy.deepcopy(ARCHITECTURE),
        },
        "method": made,
        "quantizer": quantizer,
        "dataset": {"_target_": "tests.run_support.ToyTask", "name": "toy", "limit": 4},
        "decoding": {},
        "runtime": {"device": "cpu", "results_dir": str(results_dir)},
        "logger": {"name": "none"},
    }
    for group, values in groups.items():
        base[group] = {**base[group], **values}
    return base
