"""Files of a run on disk, checked against the schema of `metrics.json`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from kvbench.results import record
from kvbench.results.store import RunStore

SCHEMA = json.loads(record.SCHEMA.read_text(encoding="utf-8"))
jsonschema.Draft202012Validator.check_schema(SCHEMA)
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def validate(content: dict) -> None:
    """Check a content of `metrics.json`; unlike `jsonschema.validate`, the schema itself is checked only once."""
    _VALIDATOR.validate(content)


def store_of(metrics: dict) -> RunStore:
    """The directory of a run, from what `run` returned."""
    return RunStore(Path(metrics["run_dir"]).parent, metrics["run_id"])


def read(run_dir: Path | str) -> dict:
    """`metrics.json`, checked against its schema."""
    content = json.loads((Path(run_dir) / "metrics.json").read_text(encoding="utf-8"))
    validate(content)
    return content


def on_disk(metrics: dict) -> dict:
    """The same, checked against what `run` returned too."""
    content = read(metrics["run_dir"])
    assert content == {key: value for key, value in metrics.items() if key != "run_dir"}
    return content
