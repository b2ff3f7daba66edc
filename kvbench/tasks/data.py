"""Files of data sets: in a local folder, in the hub's cache, or fetched from the hub.

No dataset script is ever run. A data set that is not available fails within three seconds and before a model is loaded;
the message names the override that would supply it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import struct
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, DataError, nearest
from kvbench.tasks.files import Found, is_file
from kvbench.tasks.formats import placed_records, read_json, read_records, read_text
from kvbench.tasks.records import Record

__all__ = [
    "Found",
    "HubSource",
    "Record",
    "download",
    "find",
    "fingerprint",
    "is_file",
    "is_single",
    "local",
    "placed_records",
    "read_json",
    "read_records",
    "read_text",
]

#: seconds that the one attempt to reach the hub may take, name resolution included
PROBE_SECONDS = 1.5

#: what to do where the hub is needed and does not answer
REMEDY = (
    "dataset.path=FILE_OR_FOLDER reads a local copy (.jsonl, .jsonl.gz, .json, .parquet, .zip); "
    "`python -m kvbench.fetch dataset=...` on a machine with network fills the cache to copy here"
)

#: endings of files with records, in the order in which they are looked for
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Files of a data set on the hub.

    Args:
        hub_id: repository of type dataset, for example ``zai-org/LongBench``.
        revision: commit, so that the bytes stay the same; None: the newest.
        file: path in the repository; ``{task}`` stands for a task's name, ``a.zip!b.jsonl`` for the member b.jsonl of
            an archive, and ``*`` for whatever stands there (one file only).
    """

    hub_id: str | None = None
    revision: str | None = None
    file: str = "{task}.jsonl"

    def check(self, key: str = "dataset.source") -> None:
        """Raise ConfigError for a malformed name of a repository."""
        if self.hub_id is not None and self.hub_id.count("/") != 1:
            raise ConfigError(f"{key}.hub_id", self.hub_id, "is not the name of a repository", hint="OWNER/NAME")


def find(
    source: HubSource,
    task: str,
    path: str | None,
    what: str,
    *,
    endings: Sequence[str] = ENDINGS,
    others: Mapping[str, str] | None = None,
    remedy: str = REMEDY,
) -> Found:
    """Return the file of a task, downloaded where it has to be.

    Args:
        source: on the hub.
        task: fills ``{task}`` and names local files.
        path: ``dataset.path``: a folder, an archive or a single file; None: the hub or its cache.
        what: the data set as messages name it.
        endings: of local files in a folder.
        others: names of files that hold other records than the task's, with the hint where one of them is nearest.
        remedy: the hint where the hub is needed and does not answer.

    Raises:
        DataError: it is not here and cannot be fetched, or several files are meant.
    """
    if path is not None:
        place, single = local(path, what)
        if single:
            return _member(place, task, what) if place.suffix == ".zip" else Found(place)
        return _in_folder(place, source, task, what, endings, others or {})
    name, member = _split(source.file.replace("{task}", task))
    cached = _cached(source, name)
    return Found(cached or download(source, name, what, remedy), member)


def download(source: HubSource, name: str, what: str, remedy: str = REMEDY) -> Path:
    """Fetch one file of the hub into its cache; interrupted downloads go on where they were.

    Raises:
        DataError: there is no network, no such repository, revision or file, or no access.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if source.hub_id is None:
        raise DataError(f"{what}: no file is named.\n  hint: dataset.path=FILE_OR_FOLDER")
    if constants.HF_HUB_OFFLINE:
        raise _missing(source, name, what, "HF_HUB_OFFLINE is set", remedy)
    revision = source.revision or "main"
    probed = "README.md" if "*" in name else name
    answer = probe(f"{constants.ENDPOINT}/datasets/{source.hub_id}/resolve/{revision}/{probed}")
    if isinstance(answer, str) or answer >= 500:
        raise _missing(source, name, what, f"{constants.ENDPOINT} cannot be reached ({answer})", remedy)
    if answer in (401, 403):
        raise _missing(
            source, name, what, f"the hub refused this account ({answer}); `hf auth login` with access", remedy
        )
    if answer == 404:
        raise _missing(source, name, what, f"the hub has no such file at revision {revision} (404)", remedy)
    try:
        if "*" in name:
            files = HfApi().list_repo_files(source.hub_id, repo_type="dataset", revision=source.revision)
            name = _only(sorted(fnmatch.filter(files, name)), name, what)
            # by it the snapshot is found again without network
            hf_hub_download(source.hub_id, "README.md", repo_type="dataset", revision=source.revision)
        return Path(hf_hub_download(source.hub_id, name, repo_type="dataset", revision=source.revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _missing(source, name, what, reason, remedy) from error


def probe(url: str) -> int | str:
    """Return the HTTP status of one short request, or what went wrong, in :data:`PROBE_SECONDS` at most."""
    answers: list[int | str] = []

    def ask() -> None:
        try:
            from huggingface_hub.utils import build_hf_headers, get_session

            response = get_session().head(url, headers=build_hf_headers(), timeout=PROBE_SECONDS)
            answers.append(int(response.status_code))
        except Exception as error:  # whatever goes wrong on the way is the answer
            answers.append(type(error).__name__)

    # A thread, because name resolution knows no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answers[0] if answers else f"no answer in {PROBE_SECONDS} s"


def is_single(path: str) -> bool:
    """Return True if `path` is one file of records (an archive holds several)."""
    place = Path(path).expanduser()
    return place.suffix != ".zip" and bool(is_file(place, "dataset.path="))


def local(path: str, what: str, key: str = "dataset.path") -> tuple[Path, bool]:
    """Return a place on this machine that exists, and whether it is a file (else a folder).

    Args:
        path: ``dataset.path``; ``~`` is the home folder.
        what: the data set as messages name it.
        key: the option that names the place.

    Raises:
        DataError: nothing is there, or something that is neither file nor folder.
    """
    if not path:
        raise DataError(f"{what}: {key} is empty.\n  hint: a file, a .zip, or a folder of files")
    try:
        place = Path(path).expanduser()
    except RuntimeError as error:  # ~somebody who is not known here
        raise DataError(f"{what}: {key}={path}: {error}") from error
    kind = is_file(place, f"{what}: {key}=")
    if kind is None:
        raise DataError(f"{what}: {key}={path} does not exist.\n  hint: a file, a .zip, or a folder of files")
    return place, kind


def fingerprint(records: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """Return the sha256 (16 digits) of the given fields of all records, whatever file they came from."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.get(f) for f in fields], ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


# -- local files -----------------------------------------------------------------------------------------------------


def _in_folder(
    path: Path, source: HubSource, task: str, what: str, endings: Sequence[str], others: Mapping[str, str]
) -> Found:
    """Return the one file of a folder that holds a task's records."""
    name, member = _split(source.file.replace("{task}", task))
    candidates = []
    if is_file(path / name, f"{what}: ") and (member is None or member in _members(path / name, what)):
        candidates.append(Found(path / name, member))
    for folder in (path, path / "data", path / task):
        for stem in (task, "test") if folder == path / task else (task,):
            files = (folder / f"{stem}{ending}" for ending in endings)
            candidates += [Found(file) for file in files if is_file(file, f"{what}: ")]
        parts = sorted((*folder.glob(f"{task}-*.parquet"), *(path / task).glob("test-*.parquet")))
        if len(parts) > 1:
            names = ", ".join(file.name for file in parts[:3])
            raise DataError(f"{what}: '{task}' is in {len(parts)} parts in {path} ({names}); one file is read.")
        candidates += map(Found, parts)
    candidates = list(dict.fromkeys(candidates))
    if len(candidates) > 1:
        names = ", ".join(str(file).removeprefix(f"{path}/") for file in candidates)
        raise DataError(
            f"{what}: '{task}' may be any of {len(candidates)} files in {path}: {names}.\n"
            f"  hint: leave one of them there, or name it: dataset.path={candidates[0].path}"
        )
    if candidates:
        return candidates[0]
    there = sorted(p.name for p in path.iterdir())
    near = nearest(task, there)
    if near and (other := others.get(near.split(".")[0])):
        hint = f"\n  hint: {near} is not it: {other}"
    elif near:
        hint = f"\n  hint: is it {near}? Rename it, or name the file itself: dataset.path={path / near}"
    else:
        hint = ""
    raise DataError(
        f"{what}: no file for '{task}' in {path} (looked for {task}{{{','.join(endings)}}}, also in data/).{hint}"
    )


def _member(path: Path, task: str, what: str) -> Found:
    names = _members(path, what)
    wanted = {f"{task}{ending}" for ending in ENDINGS if not ending.endswith(".gz")}
    members = [name for name in names if Path(name).name in wanted]
    if len(members) > 1:
        raise DataError(
            f"{what}: '{task}' may be any of {len(members)} members of {path}: {', '.join(members[:5])}.\n"
            "  hint: an archive with one of them"
        )
    if members:
        return Found(path, members[0])
    raise DataError(f"{what}: {path} has no member {task}.jsonl (it has {len(names)}: {', '.join(names[:5])} ...)")


def _members(path: Path, what: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        raise DataError(f"{what}: {path} is not a readable archive: {error}") from error


def _split(name: str) -> tuple[str, str | None]:
    first, _, member = name.partition("!")
    return first, member or None


def _cached(source: HubSource, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if source.hub_id is None:
        return None
    if "*" in name:
        readme = try_to_load_from_cache(source.hub_id, "README.md", revision=source.revision, repo_type="dataset")
        snapshot = Path(readme).parent if isinstance(readme, str) else None
        files = sorted(str(file.relative_to(snapshot)) for file in snapshot.glob(name)) if snapshot else []
        return snapshot / _only(files, name, source.hub_id) if snapshot and files else None
    hit = try_to_load_from_cache(source.hub_id, name, revision=source.revision, repo_type="dataset")
    return Path(hit) if isinstance(hit, str) else None


def _only(files: list[str], pattern: str, what: str) -> str:
    """Return the one file that a pattern means; a split in several parts must not be read in part."""
    if len(files) > 1:
        raise DataError(
            f"{what}: '{pattern}' means {len(files)} files ({files[0]}, ...), and one is read.\n"
            "  hint: dataset.path=FILE_OR_FOLDER with all of them, joined"
        )
    return files[0] if files else pattern


def _missing(source: HubSource, name: str, what: str, reason: str, remedy: str) -> DataError:
    return DataError(f"{what}: {source.hub_id}/{name} is not on this machine, and {reason}.\n  hint: {remedy}")
