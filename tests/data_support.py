"""Real records for tests: the folder that KVBENCH_DATA names; tests that need it are skipped where it is absent."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> Any:
    """A golden file's content."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def data_dir(*parts: str) -> Path:
    """A place in the data folder; skips the test where it is not there."""
    root = os.environ.get("KVBENCH_DATA")
    if not root:
        pytest.skip("real records: set KVBENCH_DATA to the folder that holds them")
    path = Path(root, *parts)
    if not path.exists():
        pytest.skip(f"real records: {path} does not exist")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]
