"""Sweeps on disk: the manifest, written before the first job, the records of the jobs, and the state of each job.

The folder of a sweep (``results/sweeps/<ID>/``) holds ``manifest.json``; for each job ``running-NNNN.json`` while it
runs and ``job-NNNN.json`` once it has ended; and the table of all jobs, ``table.md`` and ``table.csv``.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.results.record import problem as problem_of
from kvbench.results.store import DONE
from kvbench.util import atomic
from kvbench.util.processor import began

#: folder in which each sweep has a folder of its own
SWEEPS = Path("results/sweeps")
#: file of the manifest, and version of its format
MANIFEST, VERSION = "manifest.json", 1
#: environment variable with the mark of the current sweep's records, inherited by the workers of a launcher
TOKEN = "KVBENCH_SWEEP_TOKEN"
#: file that names the process that starts the jobs (:func:`here`)
DRIVER = "driver.json"

State = Literal["done", "running", "failed", "missing"]
#: states of a job in the order in which they are counted
STATES: tuple[State, ...] = ("done", "running", "failed", "missing")
#: statuses with which a job counts as done; memory that ran out is a result
FINAL = (*DONE, "oom")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a sweep, as planned.

    Args:
        number: index of the job, from 0; names its files and does not change if the sweep is continued.
        overrides: what would be typed after ``python -m kvbench`` to run this job alone.
        label: the values in which the job differs from others, for example ``kivi int2 residual=64``.
        run_id: id of the job's run, if it is known before the job starts; else None.
    """

    number: int
    overrides: tuple[str, ...]
    label: str
    run_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The plan of a sweep.

    Args:
        id: name of the sweep, which is also the name of its folder.
        token: mark that all records of this sweep carry, so that records of another sweep in the same folder are
            recognised.
        command: arguments of ``python -m kvbench``, as typed.
        created: time at which the sweep was first started, in ISO format.
        results_dir: folder of the runs (``runtime.results_dir``), as typed.
        jobs: the jobs in the order in which they run; jobs with the same model follow each other.
    """

    id: str
    token: str
    command: tuple[str, ...]
    created: str
    results_dir: str
    launcher: str
    jobs: tuple[Job, ...]

    def write(self, folder: Path) -> None:
        """Write the manifest to the folder of the sweep. Raises OSError if it cannot be written."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"
        atomic.replace_file(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the sweep in `folder`.

    Raises:
        KvbenchError: the file is missing, damaged or of a newer version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] > VERSION:
            raise KvbenchError(
                f"{path}: has version {content['version']}, but this kvbench reads versions up to {VERSION}.\n"
                "  hint: install a newer kvbench"
            )
        jobs = tuple(
            Job(
                number=int(job["number"]),
                overrides=tuple(map(str, job["overrides"])),
                label=str(job["label"]),
                run_id=job.get("run_id"),
            )
            for job in content["jobs"]
        )
        texts = {key: str(content[key]) for key in ("id", "token", "created", "results_dir", "launcher")}
        return Manifest(command=tuple(map(str, content["command"])), jobs=jobs, **texts)
    except OSError as error:
        raise KvbenchError(
            f"{path}: cannot be read: {error.strerror or error}.\n  hint: sweeps have a manifest since version 0.1; "
            "run the sweep's command again to write one"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise KvbenchError(
            f"{path}: is not the manifest of a sweep.\n  hint: run the sweep's command again to write it anew"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a job of a sweep, with its results if it has ended.

    Args:
        state: ``done``, ``running``, ``failed`` or ``missing`` (not started, or started and interrupted).
        status: status of the job's run (``ok``, ``oom``, ``error``, ...); None if it has not ended.
        message: message of the error, if the job has failed; else empty.
        metrics: content of the run's `metrics.json` when the job ended, with the key ``run_dir``; None if there is
            none.
        run_id: None if unknown.
    """

    job: Job
    state: State
    status: str | None = None
    message: str = ""
    metrics: dict[str, Any] | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk: its folder, and the content of its ``manifest.json``."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Sweep:
        """Return the sweep in `folder`. Raises KvbenchError if it has no valid manifest."""
        return cls(folder, read_manifest(folder))

    def progress(self) -> list[Progress]:
        """Return the present state of each job, in the order of the manifest."""
        return [self._progress(job) for job in self.manifest.jobs]

    def counts(self) -> dict[State, int]:
        """Return the number of jobs in each state."""
        seen = Counter(entry.state for entry in self.progress())
        return {state: seen[state] for state in STATES}

    def runs(self) -> list[dict[str, Any]]:
        """Return the metrics of the jobs that have ended, in the order of the manifest; each is a row of the table."""
        return [entry.metrics for entry in self.progress() if entry.metrics is not None]

    @property
    def name(self) -> str:
        """The text with which a user names the sweep: its id, or the path of its folder if that is not in SWEEPS."""
        folder = self.folder.absolute()
        return folder.name if folder.parent == SWEEPS.absolute() else str(folder)

    def driven(self) -> bool:
        """Return True if the process that started the sweep, or continued it last, still runs."""
        return _alive(_object(self.folder / DRIVER))

    def _progress(self, job: Job) -> Progress:
        content = _object(job_file(self.folder, job.number))
        if content is not None and job_record_problem(content, self.manifest.token):
            content = None
        running = _object(running_file(self.folder, job.number))
        if running is not None and (running.get("sweep") != self.manifest.token or not _alive(running)):
            running = None
        metrics = (content or {}).get("metrics")
        run_id = (running or {}).get("run_id") or (metrics or {}).get("run_id") or job.run_id
        if running is not None:
            return Progress(job=job, state="running", run_id=run_id)
        if content is None or content["status"] == "interrupted":
            return Progress(job=job, state="missing", run_id=run_id)
        status = str(content["status"])
        state: State = "done" if status in FINAL else "failed"
        return Progress(
            job=job, state=state, status=status, message=str(content["message"]), metrics=metrics, run_id=run_id
        )


def in_words(count: int) -> str:
    """Return a number of jobs with its noun: ``1 job``, ``2 jobs``."""
    return f"{count} job" if count == 1 else f"{count} jobs"


def job_file(folder: Path, number: int) -> Path:
    """Return the path of the record of a job that has ended."""
    return folder / f"job-{number:04d}.json"


def running_file(folder: Path, number: int) -> Path:
    """Return the path of the file that exists while a job runs."""
    return folder / f"running-{number:04d}.json"


def here() -> dict[str, Any]:
    """Return what identifies this process in the files of a sweep: its host, its process id, and when it began."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": began(os.getpid())}


def job_record_problem(content: Mapping[str, Any], token: str | None) -> str:
    """Return why the content of a ``job-NNNN.json`` is not a valid record of a job of a sweep; empty if it is one.

    `token` is the mark of the sweep's records (:attr:`Manifest.token`).
    """
    kinds = {"status": str, "number": int, "overrides": list, "message": str}
    if not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
        return "is not a record of a job"
    sweep, metrics = content.get("sweep"), content.get("metrics")
    if sweep is not None:
        return "" if sweep == token else "belongs to another sweep"
    if metrics is not None:  # from a worker that did not inherit the mark, or of unknown origin
        problem = problem_of(metrics)
        return f"is not a record of a job ({problem})" if problem else ""
    return ""


def named_sweep(sweeps: Path, name: str) -> Path:
    """Return the folder of a sweep.

    The name is its id, which is the name of its folder in `sweeps`, or the beginning of the id; or the path of a folder
    with a manifest, for a sweep elsewhere (``hydra.sweep.dir``).

    Raises:
        KvbenchError: no folder, or more than one, has a name that begins with `name`.
    """
    if os.sep in name and (Path(name) / MANIFEST).is_file():
        return Path(name)
    folders = sorted(path.name for path in sweeps.iterdir() if path.is_dir()) if sweeps.is_dir() else []
    matches = [name] if name in folders else [folder for folder in folders if name and folder.startswith(name)]
    if len(matches) == 1:
        return sweeps / matches[0]
    if matches:
        raise KvbenchError(
            f"{name} matches {len(matches)} sweeps: {', '.join(matches)}.\n  hint: type more characters of the name"
        )
    newest = f"; the newest one is {folders[-1]}" if folders else ""
    raise KvbenchError(f"there is no sweep {name} in {sweeps}.\n  hint: its name is that of its folder{newest}")


def newest(sweeps: Path, command: Sequence[str]) -> Sweep | None:
    """Return the latest sweep in `sweeps` that was started with the same command, as typed; None if there is none."""
    matches = []
    for path in sweeps.glob(f"*/{MANIFEST}"):
        try:
            manifest = read_manifest(path.parent)
        except KvbenchError:
            continue
        if manifest.command == tuple(command):
            matches.append(Sweep(path.parent, manifest))
    return max(matches, key=lambda sweep: (sweep.manifest.created, sweep.manifest.id), default=None)


def run_ids(folder: Path) -> set[str]:
    """Return the ids of the runs of a sweep's finished jobs, without damaged records; the folder needs no manifest."""
    ids = set()
    for path in folder.glob("job-*.json"):
        metrics = (_object(path) or {}).get("metrics")
        run_id = metrics.get("run_id") if isinstance(metrics, dict) else None
        if isinstance(run_id, str):
            ids.add(run_id)
    return ids


def _alive(process: Mapping[str, Any] | None) -> bool:
    """Return True if a process (:func:`here`) still runs; a process of another host counts as running."""
    if process is None:
        return False
    if process.get("host") != socket.gethostname():
        return True
    number = process.get("pid")
    return isinstance(number, int) and (now := began(number)) is not None and now == process.get("began", now)


def _object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, unreadable or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
