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

    Callers add the name of the model or data set to the message.

    Args:
        reason: what happened, as a clause.
        remedy: what the user can type; None if the caller provides a better hint.
        absent: True if the file is not on this machine and `reason` only says why it is not downloaded.
    """

    def __init__(self, reason: str, remedy: str | None = None, *, absent: bool = False) -> None:
        self.reason, self.remedy, self.absent = reason, remedy, absent
        super().__init__(reason)


@dataclass(frozen=True)
class Repository:
    """A repository at a revision.

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
        """Configuration key that sets the revision, for messages."""
        return "model.revision" if self.kind == "model" else "dataset.source.revision"

    @property
    def asked(self) -> str:
        """The revision as it occurs in addresses of the hub; the main branch if none is set."""
        return self.revision or "main"

    @property
    def pinned(self) -> bool:
        """True if the revision is a commit, whose content cannot change."""
        return _COMMIT.fullmatch(self.asked) is not None

    @property
    def folder(self) -> Path:
        """The repository's folder in the hub's cache; it need not exist."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / "--".join([f"{self.kind}s", *self.hub_id.split("/")])

    def url(self, name: str) -> str:
        """Return the address on the hub of the repository's file `name`."""
        from huggingface_hub import constants

        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{prefix}{self.hub_id}/resolve/{self.asked}/{name}"

    def commit(self) -> str | None:
        """Return the commit to which the revision refers according to the hub's cache; None if the cache has none."""
        if self.pinned:
            return self.asked if (self.folder / "snapshots" / self.asked).is_dir() else None
        try:
            return (self.folder / "refs" / self.asked).read_text().strip() or None
        except OSError:
            return None

    def commits(self) -> list[str]:
        """Return all commits that have files in the cache, the newest download first."""
        folders = [folder for folder in (self.folder / "snapshots").glob("*") if _COMMIT.fullmatch(folder.name)]
        return [folder.name for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)]

    def snapshot(self) -> Path | None:
        """Return the folder in the hub's cache with the files of the revision; None if there is none.

        Some files may be missing in it.
        """
        commit = self.commit()
        folder = self.folder / "snapshots" / str(commit)
        return folder if commit and folder.is_dir() else None

    def cached(self, name: str) -> Path | None:
        """Return the path of a file in the cache; None if it is not there."""
        folder = self.snapshot()
        return folder / name if folder is not None and (folder / name).is_file() else None


def commit_of(file: Path) -> str | None:
    """Return the commit of a file in the hub's cache, from its path; None for other files."""
    parts = file.parts
    place = len(parts) - 1 - parts[::-1].index("snapshots") if "snapshots" in parts else None
    commit = parts[place + 1] if place is not None and place + 1 < len(parts) else ""
    return commit if _COMMIT.fullmatch(commit) else None


def stored_hash(file: Path) -> str | None:
    """Return the hub's hash of a file in the hub's cache; None if the hash is not known.

    The cache stores a file as a link to a blob, and the blob is named by the hash. Where the cache holds a copy instead
    of a link, the hash is not recorded.
    """
    return Path(os.readlink(file)).name if file.is_symlink() else None
