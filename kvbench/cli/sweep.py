"""A sweep's record: one file per job, so that a summary can be made whichever process ran the jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench import atomic

#: sweeps are kept here, beside the runs
SWEEPS = Path("results/sweeps")


def new_folder() -> Path:
    """A folder for one sweep that does not exist yet, named for the time."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
        folder = SWEEPS / f"{stamp}{suffix}"
        if not folder.exists():
            return folder
    raise FileExistsError(f"{SWEEPS / stamp} exists a thousand times")


def record(folder: Path, number: int, outcome: Mapping[str, Any]) -> None:
    """Keep what became of job `number`: ``status``, ``overrides``, and ``metrics`` or ``message``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(outcome, indent=1, sort_keys=True) + "\n"
    atomic.write(folder / f"job-{number:04d}.json", text.encode())


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """What became of the jobs, in their order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("job-*.json"))]
