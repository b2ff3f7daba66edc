"""A sweep: its plan, and the record of its jobs.

The plan has the jobs in the order in which they run, their labels, and the units that a launcher gets. The record is a
file per job, written by the process that ran it, and the table of all jobs.

Hydra receives the jobs as the values of one key, ``job``. Each value holds the overrides of a job, or of several jobs
that run together (a unit), and is decoded by the process that runs it. So the order of the jobs, and which of them run,
are decided here and not by Hydra's sweeper.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from kvbench.cli.settings import KEY as SETTING
from kvbench.errors import KvbenchError
from kvbench.results import sweeps
from kvbench.results.sweeps import SWEEPS, TOKEN, Job
from kvbench.util import atomic

#: key of Hydra's configuration that holds the overrides of a job
JOB = "job"
#: names of the options, or of their groups, on which it depends which model is loaded, and where
MODEL = (
    *("model", "experiment"),
    *(f"runtime.{key}" for key in ("device", "device_map", "tensor_parallel", "seed", "memory_limit_gb")),
)
#: names of the options, or of their groups, that distinguish methods
METHOD = ("method", "quantizer", SETTING)
#: option with which methods share a prefill
SHARED = "runtime.shared_prefill"
#: characters of an override that need no encoding inside of Hydra's quotes
_PLAIN = "=,:/[]{}()+-._~@*!<>^;&?#"
#: separator of the jobs of a unit
_NEXT = " | "


def ordered(jobs: Sequence[Sequence[str]], *, with_fp16: bool = False) -> list[Job]:
    """Number and label the jobs of a sweep in the order in which they run.

    Jobs of one model are adjacent, so that it is loaded once. Among these, fp16 comes first, since the others are
    compared with it. Jobs that share a prefill are adjacent. Otherwise, the order is that of the command line.
    `with_fp16` adds an fp16 job wherever jobs that differ only in the method lack one.
    """
    jobs = [list(job) for job in jobs]
    if with_fp16:
        jobs += _references(jobs)
    models = _ranks([_overrides_of(job, MODEL) for job in jobs])
    others = _ranks([_rest(job) if shares(job) else () for job in jobs])
    places = sorted(range(len(jobs)), key=lambda i: (models[i], others[i], not _is_fp16(jobs[i]), i))
    chosen = [tuple(jobs[place]) for place in places]
    return [
        Job(number=number, overrides=job, label=label)
        for number, (job, label) in enumerate(zip(chosen, labels(chosen), strict=True))
    ]


def labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Name each job by the overrides in which jobs differ: ``kivi int2 residual=64``.

    Keys are shortened to their last part if that is unique. The names of methods, quantizers, settings, models and data
    sets stand for themselves.
    """
    counts = Counter(text for job in jobs for text in set(job))
    varying = [[text for text in job if counts[text] < len(jobs)] for job in jobs]
    keys = {text.partition("=")[0] for texts in varying for text in texts}
    short = Counter(key.rpartition(".")[2] for key in keys)

    def shown(text: str) -> str:
        key, _, value = text.partition("=")
        if "." not in key:
            return value.strip("'\"")
        last = key.rpartition(".")[2]
        return f"{last if short[last] == 1 else key}={value}"

    names = []
    for job, texts in zip(jobs, varying, strict=True):
        chosen = texts or [text for text in job if _sets_named(text, METHOD)] or list(job)
        names.append(" ".join(map(shown, chosen)) or "fp16")
    return names


def units(jobs: Sequence[Job]) -> list[list[Job]]:
    """Divide jobs, in the order of the manifest, into units: jobs that run together because they share a prefill.

    With ``runtime.shared_prefill=true``, these are adjacent jobs that differ only in the method; otherwise, every job
    is a unit of its own.
    """
    result: list[list[Job]] = []
    for job in jobs:
        before = result[-1][0].overrides if result else None
        if before is not None and shares(job.overrides) and _rest(before) == _rest(job.overrides):
            result[-1].append(job)
        else:
            result.append([job])
    return result


def shares(overrides: Sequence[str]) -> bool:
    """Return True if the overrides of a job ask for a shared prefill."""
    return any(text.lower() in (f"{SHARED}=true", f"{SHARED}=1", f"{SHARED}=yes", f"{SHARED}=on") for text in overrides)


def for_hydra(chosen: Sequence[Sequence[Job]]) -> str:
    """Return the override with which Hydra launches one of its jobs for each unit; :func:`decoded` reads its values."""
    return f"+{JOB}=choice({','.join(map(encoded, chosen))})"


def encoded(unit: Sequence[Job]) -> str:
    """Return a unit as a quoted value for Hydra: the number and the overrides of each job, in plain characters."""
    texts = (" ".join([str(job.number), *(quote(text, safe=_PLAIN) for text in job.overrides)]) for job in unit)
    return f"'{_NEXT.join(texts)}'"


def decoded(value: str) -> list[tuple[int, list[str]]]:
    """Return the number and the overrides of each job of a unit, the inverse of :func:`encoded`."""
    jobs = []
    for text in value.split(_NEXT):
        number, *words = text.split(" ")
        jobs.append((int(number), [unquote(word) for word in words]))
    return jobs


def _references(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return an fp16 job for each group of jobs that differ only in the method and that has no fp16 job."""
    present = {_rest(job) for job in jobs if _is_fp16(job)}
    missing = dict.fromkeys(_rest(job) for job in jobs if _rest(job) not in present)
    return [["method=fp16", *(["quantizer=none"] if _has_preset(rest) else []), *rest] for rest in missing]


def _has_preset(job: Sequence[str]) -> bool:
    """Return True if a job has a preset (``experiment=...``), which may choose a method and a quantizer."""
    return any(text != "experiment=null" for text in _overrides_of(job, ("experiment",)))


def _is_fp16(job: Sequence[str]) -> bool:
    chosen = tuple(text for text in _overrides_of(job, METHOD) if text != "quantizer=none")
    if not chosen:  # the default, unless a preset chooses a method
        return not _has_preset(job)
    return chosen in (("method=fp16",), (f"{SETTING}=fp16",))


def _rest(job: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a job that do not concern the method."""
    return _where(job, lambda text: not _sets_named(text, METHOD))


def _overrides_of(job: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return _where(job, lambda text: _sets_named(text, names))


def _where(job: Sequence[str], wanted: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(text for text in job if wanted(text))


def _sets_named(text: str, names: Sequence[str]) -> bool:
    """Return True if an override sets one of the named options, or an option of one of the named groups."""
    key = text.partition("=")[0]
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _ranks(keys: Sequence[tuple[str, ...]]) -> list[int]:
    """Number the distinct keys 0, 1, ... in the order in which they first occur: ``[b, a, b]`` gives ``[0, 1, 0]``."""
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [places[key] for key in keys]


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

    The file has ``status``, ``number``, ``overrides``, ``message`` and, if the job has any, ``metrics``.
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
