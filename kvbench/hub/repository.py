"""A repository of the hub at a revision, and its files in the hub's cache on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(Exception):
    """Error raised if a file or repository cannot be obtained from the hub.

    Functions that catch it add the name of the model or data set to the message.

    Args:
        reason: what happened, as a clause.
        remedy: what the user can do, as an imperative phrase; None if the function that catches the error knows better.
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
