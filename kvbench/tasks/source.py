"""The repository, revision and file of a data set on the hub."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Location of a data set's files on the hub.

    Args:
        hub_id: name of the dataset repository, for example ``zai-org/LongBench``; None if the data is only local.
        revision: commit that pins the content; None for the newest.
        file: path in the repository. ``{task}`` is replaced by the name of a task or split, ``a.zip!b.jsonl`` is the
            member b.jsonl of an archive, and ``*`` matches any characters (one file, or all shards of a split).
            ``@CONFIG/{task}`` stands for the files that the package `datasets` would load for that configuration and
            split, according to the repository's README and file names. ``@/{task}`` uses the default configuration.
    """

    hub_id: str | None = None
    revision: str | None = None
    file: str = "{task}.jsonl"

    def check(self, key: str = "dataset.source") -> None:
        """Raise ConfigError if the repository's name does not have the form ``OWNER/NAME``.

        Args:
            key: name of the option that holds this source, for the message.
        """
        if self.hub_id is not None and self.hub_id.count("/") != 1:
            raise ConfigError(f"{key}.hub_id", self.hub_id, "is not a valid repository name", hint="write OWNER/NAME")
