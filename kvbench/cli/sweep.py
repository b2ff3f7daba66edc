"""The record of a sweep: a file per job, written by the process that ran it, and the table of all jobs."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results import sweeps
from kvbench.results.sweeps import SWEEPS, TOKEN
from kvbench.util import atomic


def new_folder() -> Path:
    """Create a folder for the files of a sweep, and return its path; raise KvbenchError if it cannot be created.

    It is named after the current time; a number is added if that name is taken.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
        folder = SWEEPS / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():  # a parent is a file
                raise KvbenchError(
                    f"the folder {SWEEPS} cannot be created, because a file has the name of one of its parent folders."
                    "\n  hint: rename that file, or start kvbench in another folder"
                ) from None
        except OSError as error:
            raise KvbenchError(
                f"the folder {folder} cannot be created: {error.strerror or error}.\n"
                "  hint: start kvbench in a folder to which you can write"
            ) from error
        else:
            return folder
    raise KvbenchError(
        f"a thousand sweeps with the name {SWEEPS / stamp} exist already.\n  hint: wait a second and "
        "run the command again"
    )


def begin() -> None:
    """Create a new id for the sweep that is about to start; it marks the sweep's records (see :func:`outcomes`).

    The id is in an environment variable, so worker processes inherit it.
    """
    os.environ[TOKEN] = uuid.uuid4().hex


def record(folder: Path, number: int, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a job to a JSON file in the folder of the sweep.

    It has ``status``, ``number``, ``overrides``, ``message`` and, if the job has any, ``metrics``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**outcome, "sweep": os.environ.get(TOKEN)}, indent=1, sort_keys=True) + "\n"
    atomic.replace_file(sweeps.job_file(folder, number), text.encode())


def outcomes(folder: Path, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Return the outcomes of all jobs of this sweep that have recorded one, in the order of the jobs.

    Files that are damaged or belong to another sweep in the same folder are skipped; `say` gets a line about each.
    """
    records = []
    for path in sorted(folder.glob("job-*.json")):
        outcome, problem = _read_outcome(path, os.environ.get(TOKEN))
        if problem:
            say(f"{path}: {problem}; skipped")
        else:
            records.append(outcome)
    return sorted(records, key=lambda outcome: int(outcome["number"]))


def keep_table(folder: Path, markdown: str, csv: str) -> Path:
    """Write a sweep's table to its folder, as ``table.md`` and ``table.csv``, and return the path of ``table.md``.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace_file(folder / "table.csv", csv.encode())
    atomic.replace_file(folder / "table.md", markdown.encode())
    return folder / "table.md"


def outcome(folder: Path, number: int, token: str) -> dict[str, Any] | None:
    """Return the outcome of a job; None if it has not recorded a valid one with the mark `token` of this sweep."""
    content, problem = _read_outcome(sweeps.job_file(folder, number), token)
    return None if problem else content


def _read_outcome(path: Path, token: str | None) -> tuple[dict[str, Any], str]:
    """Return a job's outcome and the problem that excludes it, an empty string if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError):
        return {}, "is not JSON"
    if not isinstance(content, dict):
        return {}, "is not a record of a job"
    problem = sweeps.job_record_problem(content, token)
    return ({} if problem == "is not a record of a job" else content), problem
