"""A made-up sweep on disk, with the runs of its finished jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.results import sweeps
from kvbench.results.store import RunStore
from kvbench.results.sweeps import Job, Manifest

TOKEN = "a token"


def write_sweep(results: Path, stores: list[RunStore], name: str = "today", **changes: Any) -> Path:
    """Write a sweep of finished `stores`, a job that failed and one that has not started; return its folder."""
    folder = results / "sweeps" / name
    folder.mkdir(parents=True)
    labels = [f"setting {i}" for i in range(len(stores) + 2)]
    jobs = tuple(
        Job(number=i, overrides=("method=kivi", f"method.residual={32 * (i + 1)}"), label=label)
        for i, label in enumerate(labels)
    )
    about: dict[str, Any] = {
        "id": name,
        "token": TOKEN,
        "command": ("--multirun", "method=kivi", "method.residual=32,64"),
        "created": "2026-01-02T03:04:05",
        "results_dir": str(results / "runs"),
        "launcher": "local",
        "jobs": jobs,
    }
    Manifest(**(about | changes)).write(folder)
    for number, store in enumerate(stores):
        put(folder, number, metrics=store.metrics())
    put(folder, len(stores), status="error", message="ValueError: a bad value")
    return folder


def put(folder: Path, number: int, status: str = "ok", message: str = "", **more: Any) -> None:
    """Write the record of a job."""
    content = {"number": number, "status": status, "overrides": [], "message": message, "sweep": TOKEN, **more}
    sweeps.job_file(folder, number).write_text(json.dumps(content))
