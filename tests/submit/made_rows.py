"""A finished run on disk that no model made, with the id and the bytes that its settings have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.page import made
from kvbench.bench.prediction import CacheShape
from kvbench.config.run_config import checked_config
from kvbench.results.identity import run_id
from kvbench.results.samples import encode_row
from kvbench.results.store import RunStore
from kvbench.runner import sources
from kvbench.runner.resolve import material
from kvbench.util.confdir import group_options, read_choice

PROMPTS, ANSWER = (900, 1000, 1100), 40


def config_of(method: str = "kivi", /, **changes: Any) -> dict[str, Any]:
    """The content of a `config.yaml` of the bundled model on mini."""
    groups = {"model": read_choice(group_options("model")["tiny"]), "dataset": {"lengths": [2048]}}
    content = made.config(method, **groups)
    content["method"] |= {"takes": read_choice(group_options("method")[method]).get("takes", ["none"])}
    for key, values in changes.items():
        content[key] = {**content[key], **values}
    return content


def finished_run(
    folder: Path, method: str = "kivi", scores: tuple[float, ...] = (1.0, 0.5, 1.0), /, **changes: Any
) -> RunStore:
    """Write a run whose samples have these scores."""
    config = config_of(method, **changes)
    checked = checked_config(config)
    shape = CacheShape.of(checked.model.dimensions())
    rows = []
    for index, score in enumerate(scores):
        prompt = PROMPTS[index % len(PROMPTS)]
        used = shape.bytes(checked.method, prompt + ANSWER, prompt)
        parts = {part: getattr(used, part) for part in ("codes", "scales", "window", "index", "state")}
        held = {"total": used.total, **parts}
        sizes = {"used": held, "reserved": held, "fp16_equivalent": 4096 * (prompt + ANSWER)}
        rows.append({**made.row(index, score), "prompt_tokens": prompt, "kv_bytes": sizes})
    store = RunStore(folder, run_id(material(checked)))
    store.path.mkdir(parents=True)
    store.start(config)
    store.samples_path.write_bytes(b"".join(map(encode_row, rows)))
    known = {"code": {"0" * 12: len(rows)}, "sources": {"0" * 12: sources.code(config)}}
    metrics = made.metrics(store.run_id, config, rows, **known)
    store.write_metrics({**metrics, "env": {**(metrics["env"] or {}), "dtype": "bfloat16", "usual_dtype": "bfloat16"}})
    return store
