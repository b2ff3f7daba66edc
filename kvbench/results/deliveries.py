"""The record of what loggers have sent, in the folder of a run or of a sweep: a digest for each destination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.results.samples import write_atomically

_FILE = ".delivered.json"


def sent(folder: Path) -> dict[str, Any]:
    """Return which content was last sent to each destination, as digests; empty if nothing was sent."""
    try:
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def record(folder: Path, destination: str, digest: str) -> None:
    """Record that content with this digest was sent to a destination. Raises DiskError."""
    text = json.dumps({**sent(folder), destination: digest}, indent=2) + "\n"
    write_atomically(folder / _FILE, text.encode())
