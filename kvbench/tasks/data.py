"""Search for the files of data sets in a local folder or in the hub's cache, and their download from the hub.

No dataset script is ever run. If a file is missing and the hub does not answer, an error is raised within three
seconds, before a model is loaded. It names the override that would supply the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, DataError, nearest
from kvbench.tasks.file_parsers import placed_records, read_json, read_records, read_text
from kvbench.tasks.files import Found, is_file
from kvbench.tasks.hub_files import HubSource, cached, download, whole_split
from kvbench.tasks.records import Record

__all__ = [
    "Found",
    "HubSource",
    "Record",
    "check_split",
    "download",
    "find_records",
    "is_file",
    "is_single",
    "local",
    "placed_records",
    "read_json",
    "read_records",
    "read_text",
    "records_fingerprint",
]

#: hint of the error for a file that is neither on this machine nor available from the hub
REMEDY = (
    "set dataset.path=FILE_OR_FOLDER to read a local copy (.jsonl, .jsonl.gz, .json, .parquet, .zip); or run "
    "`python -m kvbench.fetch dataset=...` on a machine with network and copy its HF_HOME here"
)

_SPLIT = re.compile(r"[\w.-]+(/[\w.-]+)*")
#: endings of files with records
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def find_records(
    source: HubSource,
    task: str,
    path: str | None,
    what: str,
    *,
    endings: Sequence[str] = ENDINGS,
    others: Mapping[str, str] | None = None,
    remedy: str = REMEDY,
) -> Found:
    """Return the file that holds the records of a task. It is downloaded from the hub if necessary.

    `what` names the data set in messages; `remedy` is the hint if the file cannot be downloaded.

    Args:
        task: name of the task or split, which replaces ``{task}`` in `source`, and names the file in a local folder.
        path: value of the option ``dataset.path``: a folder, a .zip archive or a single file. None reads the file from
            the hub's cache, or downloads it.
        endings: endings of the file names that are considered in a local folder.
        others: for the error if a local folder does not have the file: explanations of files with similar names that
            belong to other tasks, keyed by file name without ending.

    Raises:
        DataError: the file is neither on this machine nor available from the hub, or several local files match.
    """
    if path is not None:
        place, single = local(path, what)
        if single:
            return _member(place, task, what) if place.suffix == ".zip" else Found(place)
        return _in_folder(place, source, task, what, endings, others or {})
    name, member = _split_member(source.file.replace("{task}", task))
    first, *more = cached(source, name, what) or download(source, name, what, remedy)
    return Found(first, member, tuple(more))


def check_split(key: str, name: str) -> None:
    """Raise ConfigError unless `name`, the value of the option `key`, can be the name of a file in or below a folder.

    It is checked even if `path` is a single file and does not need it, because it is part of a run's configuration.
    """
    if not _SPLIT.fullmatch(name) or ".." in name.split("/"):
        raise ConfigError(
            key,
            name,
            "is not the name of a split",
            allowed="letters, digits and . _ - only, in folders separated by /",
            hint=f"{key}=test",
        )


def is_single(path: str) -> bool:
    """Return True if `path` is a single file of records; False for a folder, a .zip archive, or a missing path."""
    place = Path(path).expanduser()
    return place.suffix != ".zip" and bool(is_file(place, "dataset.path="))


def local(path: str, what: str, key: str = "dataset.path") -> tuple[Path, bool]:
    """Return a path from the configuration with ``~`` expanded, and True if it is a file, False if it is a folder.

    `what` names the data set in messages, and `key` the option with the path.

    Raises:
        DataError: the path is empty, does not exist, or is neither a file nor a folder.
    """
    if not path:
        raise DataError(f"{what}: {key} is empty.\n  hint: name a file, a .zip archive, or a folder of files")
    try:
        place = Path(path).expanduser()
    except RuntimeError as error:  # ~somebody who is not known here
        raise DataError(f"{what}: {key}={path}: {error}") from error
    kind = is_file(place, f"{what}: {key}=")
    if kind is None:
        raise DataError(
            f"{what}: {key}={path} does not exist.\n  hint: name a file, a .zip archive, or a folder of files"
        )
    return place, kind


def records_fingerprint(records: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """Return the checksum of a data set: 16 hex digits of the SHA-256 over the given fields of all records, in order.

    The format of the file that held the records does not affect it.
    """
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.get(f) for f in fields], ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


# -- local files -----------------------------------------------------------------------------------------------------


def _in_folder(
    path: Path, source: HubSource, task: str, what: str, endings: Sequence[str], others: Mapping[str, str]
) -> Found:
    """Return the file of a folder that holds a task's records. Raises DataError unless exactly one file matches."""
    name, member = _split_member(source.file.replace("{task}", task))
    candidates = []
    if is_file(path / name, f"{what}: ") and (member is None or member in _members(path / name, what)):
        candidates.append(Found(path / name, member))
    for folder in (path, path / "data", path / task):
        for stem in (task, "test") if folder == path / task else (task,):
            files = (folder / f"{stem}{ending}" for ending in endings)
            candidates += [Found(file) for file in files if is_file(file, f"{what}: ")]
        parts = sorted((*folder.glob(f"{task}-*.parquet"), *(path / task).glob("test-*.parquet")))
        if parts:
            first, *more = map(Path, whole_split([str(part) for part in parts], task, what, path))
            candidates.append(Found(first, None, tuple(more)))
    candidates = list(dict.fromkeys(candidates))
    if len(candidates) > 1:
        names = ", ".join(str(file).removeprefix(f"{path}/") for file in candidates)
        raise DataError(
            f"{what}: {path} contains {len(candidates)} files that could be '{task}': {names}.\n"
            f"  hint: name one of them, for example dataset.path={candidates[0].path}, or remove the others"
        )
    if candidates:
        return candidates[0]
    there = sorted(p.name for p in path.iterdir())
    near = nearest(task, there)
    if near and (other := others.get(near.split(".")[0])):
        hint = f"\n  hint: {near} is not the right file: {other}"
    elif near:
        hint = f"\n  hint: if {near} is the right file, rename it, or set dataset.path={path / near}"
    else:
        hint = ""
    raise DataError(
        f"{what}: {path} has no file for '{task}' (looked for {task}{{{','.join(endings)}}}, also in data/).{hint}"
    )


def _member(path: Path, task: str, what: str) -> Found:
    names = _members(path, what)
    wanted = {f"{task}{ending}" for ending in ENDINGS if not ending.endswith(".gz")}
    members = [name for name in names if Path(name).name in wanted]
    if len(members) > 1:
        raise DataError(
            f"{what}: {path} contains {len(members)} files that could be '{task}': {', '.join(members[:5])}.\n"
            "  hint: provide an archive with only one of them"
        )
    if members:
        return Found(path, members[0])
    raise DataError(
        f"{what}: the archive {path} does not contain {task}.jsonl; it contains {len(names)} files "
        f"({', '.join(names[:5])} ...)"
    )


def _members(path: Path, what: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        raise DataError(f"{what}: {path} is not a readable archive: {error}") from error


def _split_member(name: str) -> tuple[str, str | None]:
    first, _, member = name.partition("!")
    return first, member or None
