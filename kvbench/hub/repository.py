"""A repository of the hub at a revision, its files in the hub's cache on this machine, and the record of downloads.

The record is stored next to the files. For each revision it has the commit and the checksums of the first download.

A branch can move between two downloads, which would mix files of two commits in one data set or checkpoint. Therefore
the first commit to which a branch referred on this machine is recorded, and files of another commit raise an error. If
the revision is itself a commit, only checksums are recorded. If the cache is not writable, nothing is recorded; rows of
results contain commits and checksums in any case.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from kvbench.util import atomic

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(Exception):
    """Error raised if a file or repository cannot be obtained from the hub.

    Functions that catch it add the name of the model or data set to the message.

    Args:
        reason: what happened, as a clause.
        remedy: what the user can do, as an imperative phrase; None: the function that catches the error decides.
        absent: True if the problem is that the file is not on this machine, and `reason` says why it cannot be
            downloaded.
    """

    def __init__(self, reason: str, remedy: str | None = None, *, absent: bool = False) -> None:
        self.reason, self.remedy, self.absent = reason, remedy, absent
        super().__init__(reason)


@dataclass(frozen=True)
class Repository:
    """A repository of the hub at a revision.

    Args:
        hub_id: ``OWNER/NAME``.
        kind: ``model`` or ``dataset``.
        revision: commit, branch or tag; None for the main branch.
    """

    hub_id: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None

    @property
    def key(self) -> str:
        """Configuration key with which a user sets the revision, for messages."""
        return "model.revision" if self.kind == "model" else "dataset.source.revision"

    @property
    def asked(self) -> str:
        """The revision for requests to the hub: ``main`` if none is set."""
        return self.revision or "main"

    @property
    def pinned(self) -> bool:
        """True if the revision is a commit, whose content cannot change."""
        return _COMMIT.fullmatch(self.asked) is not None

    @property
    def folder(self) -> Path:
        """The repository's folder in the hub's cache, whether or not it exists."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / "--".join([f"{self.kind}s", *self.hub_id.split("/")])

    def url(self, name: str) -> str:
        """Return the URL of a file of the repository on the hub."""
        from huggingface_hub import constants

        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{prefix}{self.hub_id}/resolve/{self.asked}/{name}"

    def commit(self) -> str | None:
        """Return the commit to which the revision refers in the hub's cache; None if the cache does not contain it."""
        if self.pinned:
            return self.asked if (self.folder / "snapshots" / self.asked).is_dir() else None
        try:
            return (self.folder / "refs" / self.asked).read_text().strip() or None
        except OSError:
            return None

    def commits(self) -> list[str]:
        """Return all commits of the repository that have files in the hub's cache, most recently downloaded first."""
        folders = [folder for folder in (self.folder / "snapshots").glob("*") if _COMMIT.fullmatch(folder.name)]
        return [folder.name for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)]

    def snapshot(self) -> Path | None:
        """Return the folder in the hub's cache with the files of the revision; None if there is none.

        The folder may lack files that have not been downloaded.
        """
        commit = self.commit()
        folder = self.folder / "snapshots" / str(commit)
        return folder if commit and folder.is_dir() else None

    def cached(self, name: str) -> Path | None:
        """Return the path in the hub's cache of a file of the revision; None if the file is not there."""
        folder = self.snapshot()
        return folder / name if folder is not None and (folder / name).is_file() else None


def commit_of(file: Path) -> str | None:
    """Return the commit to which a file in the hub's cache belongs, from its path; None if it is not in the cache."""
    parts = file.parts
    place = len(parts) - 1 - parts[::-1].index("snapshots") if "snapshots" in parts else None
    commit = parts[place + 1] if place is not None and place + 1 < len(parts) else ""
    return commit if _COMMIT.fullmatch(commit) else None


def stored_hash(file: Path) -> str | None:
    """Return the hash that the hub lists for a file, read off the hub's cache; None if the cache does not contain it.

    The cache stores a file as a link to a blob that is named by its hash. On systems where the cache contains a copy
    instead of a link, the hash is not known.
    """
    return Path(os.readlink(file)).name if file.is_symlink() else None


#: name of the record in the repository's folder
FILE = "kvbench.json"


def recorded(repository: Repository) -> dict[str, Any]:
    """Return what this machine has recorded about the downloads from a repository at its revision; empty if nothing.

    It is a dict with ``commit``, ``fetched`` (date of the first download), ``files`` (``bytes`` and ``sha256`` by file
    name) and possibly ``splits`` (names of files by split).
    """
    entry = _read_record(repository).get(repository.asked)
    return entry if isinstance(entry, dict) and isinstance(entry.get("files"), dict) else {}


def settle(repository: Repository, commit: str | None, place: str) -> None:
    """Check that a revision still refers to the commit recorded at its first use; record the commit if it is new.

    Nothing happens if `commit`, to which the revision refers now, is unknown (None) or the revision is itself a commit.
    `place` says in the message where `commit` was found: ``the hub`` or ``the hub's cache on this machine``.

    Raises:
        HubError: the revision now refers to another commit than the recorded one; the message names both.
    """
    if commit is None or repository.pinned:
        return
    first = recorded(repository)
    if not first:
        _update(repository, {"commit": commit, "fetched": datetime.date.today().isoformat(), "files": {}})
    elif first["commit"] != commit:
        raise HubError(
            f"revision {repository.asked} of {repository.hub_id} has moved: it was commit "
            f"{first['commit']} when it was first "
            f"fetched ({first.get('fetched')}), but {place} now has {commit}. Nothing was downloaded or changed",
            f"fetch with {repository.key}={first['commit']} to complete the first commit, after which runs without "
            f"that key work again; or run with {repository.key}={commit} to use the new commit, which starts new runs",
        )


def note(repository: Repository, files: Iterable[tuple[str, Path]]) -> dict[str, dict[str, Any]]:
    """Record ``bytes`` and ``sha256`` of downloaded files by name, and return them.

    `files` are pairs of a name in the repository and a path in the hub's cache. Hashes that are recorded already
    are not computed again, unless the size of the file has changed.
    """
    known = recorded(repository).get("files") or {}
    entries, fresh = {}, {}
    for name, path in files:
        entry = known.get(name)
        if not isinstance(entry, dict) or entry.get("bytes") != path.stat().st_size:
            entry = fresh[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        entries[name] = entry
    if fresh:
        commit = repository.commit()
        today = datetime.date.today().isoformat()
        _update(repository, {"commit": commit, "fetched": today, "files": fresh})
    return entries


def note_split(repository: Repository, name: str, files: Sequence[str]) -> None:
    """Record which files make up a split of a data set, such as ``test``, for later use without the hub."""
    today = datetime.date.today().isoformat()
    splits = {name: list(files)}
    _update(repository, {"commit": repository.commit(), "fetched": today, "files": {}, "splits": splits})


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in the hub's cache; it is computed only if the cache does not contain it."""
    name = stored_hash(file) or ""
    if len(name) == 64:
        return name
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(file: Path) -> None:
    """Check a downloaded file against the hash that the hub lists for it, and delete the file if they differ.

    The hub lists the SHA-256 of large files and git's SHA-1 of other files. A file whose hash is not known is not
    checked.

    Raises:
        HubError: the hashes differ.
    """
    expected = stored_hash(file) or ""
    with file.open("rb") as stream:
        if len(expected) == 64:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        elif len(expected) == 40:
            digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
            while piece := stream.read(1 << 20):
                digest.update(piece)
            content = digest.hexdigest()
        else:
            return
    if content != expected:
        blob = file.resolve()
        file.unlink()
        blob.unlink(missing_ok=True)
        raise HubError(
            f"the content of {file.name} does not have the checksum that the hub lists ({content[:12]}..., expected "
            f"{expected[:12]}...); the file was removed",
            "run the same command again; if the error remains, a proxy is probably changing the file",
        )


def _read_record(repository: Repository) -> dict[str, Any]:
    try:
        content = json.loads((repository.folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    revisions = content.get("revisions") if isinstance(content, dict) else None
    return revisions if isinstance(revisions, dict) else {}


def _update(repository: Repository, entry: dict[str, Any]) -> None:
    """Merge an entry into the revision's record: an earlier commit and date stay, files and splits are added."""
    with suppress(OSError):  # a cache that is only readable
        repository.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(repository.folder / f".{FILE}.lock"):
            revisions = _read_record(repository)
            before = revisions.get(repository.asked) or {}
            merged = {key: {**before.get(key, {}), **entry[key]} for key in ("files", "splits") if entry.get(key)}
            revisions[repository.asked] = {**entry, **before, **merged}
            text = json.dumps({"version": 1, "revisions": revisions}, indent=1, sort_keys=True)
            atomic.replace_file(repository.folder / FILE, text.encode() + b"\n")
