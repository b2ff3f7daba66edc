"""Records and texts from where they lie: a local folder or file, the hub's cache, or the hub.

No dataset script is ever run. A data set that cannot be had is said in under three seconds and before a model is
loaded, with the override that would supply it.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import threading
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, DataError, nearest

Record = dict[str, Any]

#: seconds that the one attempt to reach the hub may take, name resolution included
PROBE_SECONDS = 1.5

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
        """Raise ConfigError for a repository's name that is none."""
        if self.hub_id is not None and self.hub_id.count("/") != 1:
            raise ConfigError(f"{key}.hub_id", self.hub_id, "is no repository", hint="OWNER/NAME")


@dataclass(frozen=True)
class Found:
    """A file that is on this machine, and the member of it where it is an archive."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}!{self.member}"

    def content(self) -> bytes:
        """The bytes, unpacked.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        try:
            if self.member is not None:
                with zipfile.ZipFile(self.path) as archive:
                    return archive.read(self.member)
            data = self.path.read_bytes()
            return gzip.decompress(data) if self.path.suffix == ".gz" else data
        except (OSError, EOFError, KeyError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{self} cannot be read: {error}.\n  hint: fetch it again") from error

    @property
    def ending(self) -> str:
        """What the content is: ``.jsonl``, ``.json``, ``.parquet``, ``.txt`` ..."""
        return Path((self.member or self.path.name).removesuffix(".gz")).suffix


def find(source: HubSource, task: str, path: str | None, what: str, *, endings: Sequence[str] = ENDINGS) -> Found:
    """Where a task's file lies, downloaded where it has to be.

    Args:
        source: on the hub.
        task: fills ``{task}`` and names local files.
        path: ``dataset.path``: a folder, an archive or a single file; None: the hub or its cache.
        what: the data set as messages name it.
        endings: of local files in a folder.

    Raises:
        DataError: it is not here and cannot be fetched.
    """
    if path is not None:
        return _local(Path(path).expanduser(), source, task, what, endings)
    name, member = _split(source.file.replace("{task}", task))
    cached = _cached(source, name)
    return Found(cached or download(source, name, what), member)


def download(source: HubSource, name: str, what: str) -> Path:
    """Fetch one file of the hub into its cache; interrupted downloads go on where they were.

    Raises:
        DataError: there is no network, no such repository, revision or file, or no access.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if source.hub_id is None:
        raise DataError(f"{what}: no file is named.\n  hint: dataset.path=FILE_OR_FOLDER")
    if constants.HF_HUB_OFFLINE:
        raise _missing(source, name, what, "HF_HUB_OFFLINE is set")
    revision = source.revision or "main"
    probed = "README.md" if "*" in name else name
    answer = probe(f"{constants.ENDPOINT}/datasets/{source.hub_id}/resolve/{revision}/{probed}")
    if isinstance(answer, str) or answer >= 500:
        raise _missing(source, name, what, f"{constants.ENDPOINT} cannot be reached ({answer})")
    if answer in (401, 403):
        raise _missing(source, name, what, f"the hub refused this account ({answer}); `hf auth login` with access")
    if answer == 404:
        raise _missing(source, name, what, f"the hub has no such file at revision {revision} (404)")
    try:
        if "*" in name:
            files = HfApi().list_repo_files(source.hub_id, repo_type="dataset", revision=source.revision)
            name = _only(sorted(fnmatch.filter(files, name)), name, what)
            # by it the snapshot is found again without network
            hf_hub_download(source.hub_id, "README.md", repo_type="dataset", revision=source.revision)
        return Path(hf_hub_download(source.hub_id, name, repo_type="dataset", revision=source.revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _missing(source, name, what, str(error).splitlines()[0]) from error


def probe(url: str) -> int | str:
    """HTTP status of one short request, or what went wrong, in :data:`PROBE_SECONDS` at most."""
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


def read_records(found: Found, fields: Iterable[str] = ()) -> list[Record]:
    """The records of a file: JSON lines, a JSON list, or parquet.

    Args:
        found: where.
        fields: keys that every record must have.

    Raises:
        DataError: a damaged file, a line that is no JSON, a field that is missing.
    """
    content = found.content()
    if found.ending == ".parquet":
        records = _parquet(content, found)
    else:
        text = _utf8(content, found)
        if found.ending == ".json" and text.lstrip()[:1] == "[":
            records = _json(text, found, 1)
        else:
            lines = enumerate(text.split("\n"), start=1)
            records = [_json(line, found, number) for number, line in lines if line.strip()]
    for number, record in enumerate(records):
        for field in fields:
            if not isinstance(record, dict) or field not in record:
                has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise DataError(f"{found}: record {number} has no field '{field}' (it has: {has}).")
    return records


def is_single(path: str) -> bool:
    """Whether `path` is one file of records (an archive holds several)."""
    place = Path(path).expanduser()
    return place.is_file() and place.suffix != ".zip"


def read_text(found: Found) -> str:
    """A file as UTF-8 text."""
    return _utf8(found.content(), found)


def fingerprint(records: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """sha256 (16 digits) of the given fields of all records, whatever file they came from."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.get(f) for f in fields], ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


# -- local files -----------------------------------------------------------------------------------------------------


def _local(path: Path, source: HubSource, task: str, what: str, endings: Sequence[str]) -> Found:
    if path.is_file():
        return _member(path, task, what) if path.suffix == ".zip" else Found(path)
    if not path.is_dir():
        raise DataError(f"{what}: dataset.path={path} does not exist.\n  hint: a file, a .zip, or a folder of files")
    name, member = _split(source.file.replace("{task}", task))
    if (path / name).is_file():
        return Found(path / name, member)
    for folder in (path, path / "data", path / task):
        for ending in endings:
            stems = (task, "test") if folder == path / task else (task,)
            for file in (folder / f"{stem}{ending}" for stem in stems):
                if file.is_file():
                    return Found(file)
        if found := sorted((*folder.glob(f"{task}-*.parquet"), *(path / task).glob("test-*.parquet"))):
            if len(found) > 1:
                names = ", ".join(file.name for file in found[:3])
                raise DataError(f"{what}: '{task}' is in {len(found)} parts in {path} ({names}); one file is read.")
            return Found(found[0])
    there = sorted(p.name for p in path.iterdir())
    near = nearest(task, there)
    raise DataError(
        f"{what}: no file for '{task}' in {path} (looked for {task}{{{','.join(endings)}}}, also in data/)."
        + (f"\n  hint: is it {near}? Rename it, or name the file itself: dataset.path={path / near}" if near else "")
    )


def _member(path: Path, task: str, what: str) -> Found:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{what}: {path} is no archive that can be read: {error}") from error
    for name in names:
        if Path(name).name in {f"{task}{ending}" for ending in ENDINGS if not ending.endswith(".gz")}:
            return Found(path, name)
    raise DataError(f"{what}: {path} has no member {task}.jsonl (it has {len(names)}: {', '.join(names[:5])} ...)")


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
        found = sorted(str(file.relative_to(snapshot)) for file in snapshot.glob(name)) if snapshot else []
        return snapshot / _only(found, name, source.hub_id) if snapshot and found else None
    hit = try_to_load_from_cache(source.hub_id, name, revision=source.revision, repo_type="dataset")
    return Path(hit) if isinstance(hit, str) else None


def _only(files: list[str], pattern: str, what: str) -> str:
    """The one file that a pattern means; a split in several parts must not be read in part."""
    if len(files) > 1:
        raise DataError(
            f"{what}: '{pattern}' means {len(files)} files ({files[0]}, ...), and one is read.\n"
            "  hint: dataset.path=FILE_OR_FOLDER with all of them, joined"
        )
    return files[0] if files else pattern


def _missing(source: HubSource, name: str, what: str, reason: str) -> DataError:
    return DataError(
        f"{what}: {source.hub_id}/{name} is not on this machine, and {reason}.\n"
        "  hint: dataset.path=FILE_OR_FOLDER reads a local copy (.jsonl, .jsonl.gz, .json, .parquet, .zip); "
        "`python -m kvbench.fetch dataset=...` on a machine with network fills the cache to copy here"
    )


# -- formats ---------------------------------------------------------------------------------------------------------


def _utf8(content: bytes, found: Found) -> str:
    """Text without the byte order mark that some editors write."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{found} is not UTF-8 text: {error}.") from error


def _json(text: str, found: Found, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{found} line {line}: not JSON ({error}).") from error


def _parquet(content: bytes, found: Found) -> list[Record]:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{found}: reading parquet needs pyarrow.\n  hint: pip install pyarrow") from error
    try:
        rows: list[Record] = parquet.read_table(io.BytesIO(content)).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{found} cannot be read: {error}.\n  hint: fetch it again") from error
    return rows
