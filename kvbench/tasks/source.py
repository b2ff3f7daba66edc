"""The repository, revision and file of a data set on the hub."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import ConfigError


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
