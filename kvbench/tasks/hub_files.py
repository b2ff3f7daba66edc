"""Files of a data set on the hub: in the cache of this machine, or downloaded into it.

Of a source, the repository and the revision count; `name` replaces its `file`: the path of a file in the repository, a
pattern with ``*``, or a split (``@CONFIG/SPLIT``). `what` is the data set's name in messages, and `remedy` a hint for
the user if the hub does not have the file or cannot be reached.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import ConfigError, DataError
from kvbench.hub.repository import HubError, Repository, note_split, recorded, settle
from kvbench.hub.transfer import Plan, demand, fetch, fetch_file, plan
from kvbench.tasks.splits import is_split, split_files, whole_split


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
