"""Files of a data set on the hub: in the cache of this machine, or downloaded into it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import DataError
from kvbench.hub.ask import demand
from kvbench.hub.record import note_split, recorded, settle
from kvbench.hub.repository import HubError, Repository
from kvbench.hub.transfer import Plan, fetch, fetch_file, plan
from kvbench.tasks.shards import whole_split
from kvbench.tasks.source import HubSource
from kvbench.tasks.splits import is_split, split_files


def cached(source: HubSource, name: str, what: str) -> list[Path] | None:
    """Return the paths of a data file, or of all its shards, in the hub's cache; None if one is missing there.

    Args:
        source: repository and revision; its `file` is not used.
        name: path of the file in the repository, a pattern with ``*``, or a split (``@CONFIG/SPLIT``).
        what: the data set's name in messages.

    Raises:
        DataError: the commit in the cache is not the one that was first fetched for this revision.
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
            raise refusal(source, name, what, error, "") from error
    return files or None


def download(source: HubSource, name: str, what: str, remedy: str) -> list[Path]:
    """Download a file, or all shards that a pattern matches, into the hub's cache and return their paths.

    Args:
        source: repository and revision; its `file` is not used.
        name: path of the file in the repository, a pattern with ``*``, or a split (``@CONFIG/SPLIT``).
        what: the data set's name in messages.
        remedy: hint of the error for a file that cannot be downloaded.

    Raises:
        DataError: no repository is named; the repository, revision or file does not exist or is not accessible; the
            network fails or the disk is full; the download is incomplete or does not have the hub's checksum; the
            revision now names another commit; or `name` matches files that are not the shards of one split.
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
        raise refusal(source, name, what, error, remedy) from error


def sizes(source: HubSource, name: str, what: str, remedy: str) -> tuple[int, int | None]:
    """Return the size of a data file on the hub, and how much of it is still to be downloaded.

    Args:
        source: repository and revision; its `file` is not used.
        name: path of the file in the repository, a pattern with ``*``, or a split (``@CONFIG/SPLIT``).
        what: the data set's name in messages.
        remedy: hint of the error for a file that cannot be looked up.

    Returns:
        The size in bytes of the file or of all its shards, and the bytes that are not in the cache. The second is None
        if the hub's answer gives no size; the first is then 0 for a single file.

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
        raise refusal(source, name, what, error, remedy) from error


def refusal(source: HubSource, name: str, what: str, error: HubError, remedy: str) -> DataError:
    """Return the DataError that reports a file that the hub does not provide.

    Args:
        source: repository and revision.
        name: path, pattern or split that was asked for.
        what: the data set's name in messages.
        error: the failure of the request.
        remedy: hint that is added if the file is not on this machine; may be empty.
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
