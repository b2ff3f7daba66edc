"""A sweep's record: one file per job, whichever process ran it, and the table of all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results.record import problem as problem_of
from kvbench.util import atomic

#: folder of the sweeps
SWEEPS = Path("results/sweeps")
#: environment variable that names a job's sweep; workers of a launcher inherit it
TOKEN = "KVBENCH_SWEEP_TOKEN"


def new_folder() -> Path:
    """Make and return a folder for one sweep, named after the time; two sweeps of one second get one each.

    Raises:
        KvbenchError: it cannot be made.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
        folder = SWEEPS / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():  # a parent is a file
                raise KvbenchError(f"{SWEEPS} cannot be made: one of its parents is a file.") from None
        except OSError as error:
            raise KvbenchError(f"{folder} cannot be made: {error.strerror or error}.") from error
        else:
            return folder
    raise KvbenchError(f"{SWEEPS / stamp} exists a thousand times.\n  hint: wait a second")


def begin() -> None:
    """Give this sweep a name, which tells its records from another sweep's in the same folder."""
    os.environ[TOKEN] = uuid.uuid4().hex


def record(folder: Path, number: int, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of job `number`: ``status``, ``overrides``, and ``metrics`` or ``message``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**outcome, "sweep": os.environ.get(TOKEN)}, indent=1, sort_keys=True) + "\n"
    atomic.write(folder / f"job-{number:04d}.json", text.encode())


def outcomes(folder: Path, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Return the outcomes of the jobs in order; report and skip files of another sweep and files that are no record.

    Args:
        folder: folder of the sweep.
        say: receives a line for the user.
    """
    records = []
    for path in sorted(folder.glob("job-*.json")):
        outcome, problem = _read(path)
        if problem:
            say(f"{path}: {problem}; skipped")
        else:
            records.append(outcome)
    return sorted(records, key=lambda outcome: int(outcome["number"]))


def keep_table(folder: Path, markdown: str, csv: str) -> Path:
    """Write the sweep's table into its folder as Markdown and CSV and return the former; raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / "table.csv", csv.encode())
    atomic.write(folder / "table.md", markdown.encode())
    return folder / "table.md"


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return a record and an empty string, or the problem with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError):
        return {}, "is not JSON"
    kinds = {"status": str, "number": int, "overrides": list, "message": str}
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
        return {}, "is not a record of a job"
    sweep, metrics = content.get("sweep"), content.get("metrics")
    if sweep is not None:
        return content, "" if sweep == os.environ.get(TOKEN) else "is of another sweep"
    if metrics is not None:  # of a worker that did not inherit the name, or of unknown origin
        problem = problem_of(metrics)
        return content, f"is not a record of a job ({problem})" if problem else ""
    return content, ""
