"""Files of a data set on the hub: search for the files of a split, look-up in the local cache, and download.

The package `datasets` resolves a split and its shards from a repository's README and file names. It is given a folder
of empty files with the names of the repository's files, so that it applies its rules without the network. Otherwise it
would retry for half a minute if the network fails. The files themselves are downloaded by `kvbench.hub`.

Shards are files named ``STEM-00000-of-00002.parquet``, into which the hub divides large splits; some uploads add a
digest: ``test-00000-of-00001-29a571947c0b5ccc.parquet``.

In the functions below, `name` replaces the `file` of a source: it is the path of a file in the repository, a pattern
with ``*``, or a split (``@CONFIG/SPLIT``). `what` is the data set's name in messages, and `remedy` a hint for the user
if the hub does not have the file or cannot be reached.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvbench.errors import ConfigError, DataError
from kvbench.hub.repository import HubError, Repository, note_split, recorded, settle
from kvbench.hub.transfer import Plan, demand, fetch, fetch_file, plan
from kvbench.tasks.file_parsers import silenced

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?\.parquet")


def whole_split(files: Sequence[str], wanted: str, what: str, place: object) -> list[str]:
    """Return the files that a name or pattern has matched, sorted, if they are one file or all shards of one split.

    `files` must not be empty. `wanted` (the name or pattern), `what` (the data set) and `place` (the folder or
    repository that was searched) are for error messages.

    Raises:
        DataError: there are several files that are not the shards of one split, or one of the shards is missing.
    """
    ordered = sorted(files)
    shards = [_SHARD.fullmatch(file) for file in ordered]
    series = {(shard["stem"], int(shard["count"])) for shard in shards if shard}
    if len(series) != 1 or not all(shards):
        if len(ordered) == 1:
            return ordered
        raise DataError(
            f"{what}: '{wanted}' matches {len(ordered)} files of {place} ({ordered[0]}, ...) that are not the shards "
            "of one split.\n  hint: concatenate the files and set dataset.path=FILE_OR_FOLDER"
        )
    (stem, count), *_ = series
    numbers = {int(shard["number"]) for shard in shards if shard}
    missing = sorted(set(range(count)) - numbers)
    if missing or len(ordered) != count:
        digits = len(next(shard["number"] for shard in shards if shard))
        absent = f"{stem}-{missing[0] if missing else 0:0{digits}}-of-{count:0{digits}}.parquet"
        raise DataError(
            f"{what}: '{wanted}' lacks {PurePosixPath(absent).name}, one of its {count} shards in {place}.\n"
            "  hint: download or copy the missing file as well"
        )
    return ordered


#: most files of a repository whose splits are resolved
_MOST = 20_000


def is_split(name: str) -> bool:
    """Return True if `name` refers to a split, as ``@CONFIG/SPLIT`` or ``@/SPLIT``, rather than to a file."""
    return name.startswith("@")


def split_files(name: str, names: Sequence[str], readme: Path | None) -> list[str]:
    """Return the paths of the files that hold a split of a repository, in the order of the split's rows.

    Args:
        name: the split, as ``@CONFIG/SPLIT``, or ``@/SPLIT`` for the repository's default configuration.
        names: paths of all files of the repository.
        readme: a local copy of the repository's README.md, which may define configurations; None if it has none.

    Raises:
        HubError: the repository does not have this configuration or split, can be read only by a script of its own, or
            has more files than are supported.
    """
    import datasets

    config, _, split = name.removeprefix("@").rpartition("/")
    plain = [entry for entry in names if not PurePosixPath(entry).is_absolute() and ".." not in entry.split("/")]
    if len(plain) > _MOST:
        raise HubError(
            f"the repository has {len(plain)} files, too many to find those of a split",
            "name the split's files: dataset.source.file=FILE",
        )
    with tempfile.TemporaryDirectory() as temporary, silenced():
        folder = Path(temporary, "repository")
        for entry in plain:
            (folder / entry).parent.mkdir(parents=True, exist_ok=True)
            (folder / entry).touch()
        if readme is not None:
            shutil.copyfile(readme, folder / "README.md")
        try:
            builder = datasets.load_dataset_builder(str(folder), name=config or None, cache_dir=f"{temporary}/cache")
            splits = {str(key): list(files) for key, files in (builder.config.data_files or {}).items()}
        except Exception as error:  # the kinds of errors of `datasets` change with its version
            reason = str(error).replace(str(folder), "the repository").splitlines()[0].rstrip(".")
            scripts = [entry for entry in plain if entry.endswith(".py")]
            script = f"; it has a script ({scripts[0]}), and scripts are never run" if scripts else ""
            raise HubError(
                f"the package datasets does not find the split's files: {reason}{script}",
                "set dataset.source.file=@CONFIG/{task}, where CONFIG is a configuration listed on the data set's hub "
                "page, or dataset.source.file=PATH, where PATH is a file in the repository",
            ) from error
        if split not in splits:
            raise HubError(
                f"the repository has no split '{split}' (it has: {', '.join(splits)})",
                "set dataset.split to one of them",
            )
        return [Path(file).resolve().relative_to(folder.resolve()).as_posix() for file in splits[split]]


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Place of a data set's files on the hub: repository, revision and path.

    Args:
        hub_id: name of the dataset repository, for example ``zai-org/LongBench``; None if the data is only local.
        revision: commit that fixes the content, or a branch or tag; None for the newest commit.
        file: path in the repository. ``{task}`` stands for the name of a task or split. ``*`` matches any characters;
            the path must then match a single file, or all shards of one split. ``a.zip!b.jsonl`` is the file b.jsonl
            inside the archive a.zip. ``@CONFIG/{task}`` lets the package `datasets` find the files of a split in the
            configuration CONFIG, from the repository's README and file names, and ``@/{task}`` does so in the default
            configuration.
    """

    hub_id: str | None = None
    revision: str | None = None
    file: str = "{task}.jsonl"

    def check(self, key: str = "dataset.source") -> None:
        """Raise ConfigError, which names the option `key`, if a repository is not named in the form ``OWNER/NAME``."""
        if self.hub_id is not None and self.hub_id.count("/") != 1:
            raise ConfigError(f"{key}.hub_id", self.hub_id, "is not a valid repository name", hint="write OWNER/NAME")


def cached(source: HubSource, name: str, what: str) -> list[Path] | None:
    """Return the local paths of a data file or its shards if all of them have been downloaded, else None.

    This makes no network request; it only looks into the hub's cache on this machine.

    Raises:
        DataError: the cached files are from another commit than the one recorded when this revision was first fetched.
    """
    repository = _repository(source)
    folder = None if repository is None else repository.snapshot()
    if repository is None or folder is None:
        return None
    if is_split(name):
        matches = [str(file) for file in recorded(repository).get("splits", {}).get(name, [])]
    elif "*" in name:
        matches = [str(file.relative_to(folder)) for file in folder.glob(name) if file.is_file()]
    else:
        matches = [name]
    try:
        ordered = whole_split(matches, name, what, folder) if matches and not is_split(name) else matches
    except DataError:
        return None
    files = [folder / file for file in ordered]
    if not all(file.is_file() for file in files):
        return None
    if files:
        try:
            settle(repository, repository.commit(), "the hub's cache on this machine")
        except HubError as error:
            raise unavailable_error(source, name, what, error, "") from error
    return files or None


def download(source: HubSource, name: str, what: str, remedy: str) -> list[Path]:
    """Download a data file or all shards of a split into the hub's cache, and return their local paths.

    Raises:
        DataError: no repository is named; the repository, revision or file does not exist or is not accessible; the
            network fails or the disk is full; the download is incomplete or its checksum is wrong; the revision no
            longer names the commit that was first fetched; or `name` matches files that are not the shards of one
            split.
    """
    repository = _repository(source)
    if repository is None:
        raise DataError(f"{what}: no file is given.\n  hint: set dataset.path=FILE_OR_FOLDER")
    try:
        if "*" not in name and not is_split(name):
            return [fetch_file(repository, name)]
        files = plan(repository, lambda names: _matching(names, name, what, repository), "README.md")
        folder = fetch(repository, files)
        if is_split(name):
            note_split(repository, name, files.files)
        return [folder / file for file in files.files]
    except HubError as error:
        raise unavailable_error(source, name, what, error, remedy) from error


def sizes(source: HubSource, name: str, what: str, remedy: str) -> tuple[int, int | None]:
    """Return the size of a data file and the number of bytes still to be downloaded, without downloading it.

    Returns:
        The total size in bytes of the file or its shards, and the number of these bytes that are not in the local
        cache. If the hub does not report the size of a single file, the result is ``(0, None)``. It is ``(0, 0)`` if
        the source names no repository.

    Raises:
        DataError: the hub cannot be reached, or does not have the file.
    """
    repository = _repository(source)
    if repository is None:
        return 0, 0
    here = cached(source, name, what)
    if here:
        return sum(file.stat().st_size for file in here), 0
    try:
        if "*" not in name and not is_split(name):
            size = demand(repository, name).size
            return size or 0, size
        files: Plan = plan(repository, lambda names: _matching(names, name, what, repository), "README.md")
        return files.total, files.missing_bytes
    except HubError as error:
        raise unavailable_error(source, name, what, error, remedy) from error


def unavailable_error(source: HubSource, name: str, what: str, error: HubError, remedy: str) -> DataError:
    """Convert a failed hub request into a DataError that says which file is unavailable, why, and what the user can do.

    `remedy` is shown only if `error` says that the file is absent from this machine; it may be empty.
    """
    head = f"{source.hub_id}/{name} is not on this machine, and " if error.absent else ""
    hints = [hint for hint in (error.remedy, remedy if error.absent else "") if hint]
    return DataError(f"{what}: {head}{error.reason}." + (f"\n  hint: {'; '.join(hints)}" if hints else ""))


def _repository(source: HubSource) -> Repository | None:
    return None if source.hub_id is None else Repository(source.hub_id, "dataset", source.revision)


def _matching(names: Sequence[str], pattern: str, what: str, repository: Repository) -> list[str]:
    if is_split(pattern):
        return split_files(pattern, names, fetch_file(repository, "README.md") if "README.md" in names else None)
    matches = fnmatch.filter(names, pattern)
    if not matches:
        raise HubError(f"the hub does not have this file at revision {repository.asked}", absent=True)
    return whole_split(matches, pattern, what, repository.hub_id)
