"""The repository, revision and file of a data set on the hub."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Files of a data set on the hub.

    Args:
        hub_id: repository of type dataset, for example ``zai-org/LongBench``; None if there is none.
        revision: commit, which pins the content; None for the newest.
        file: path in the repository. ``{task}`` is replaced by the name of a task or split, ``a.zip!b.jsonl`` is the
            member b.jsonl of an archive, and ``*`` matches any characters (one file, or all shards of a split).
            ``@CONFIG/{task}`` is what the package `datasets` takes for the split: the files that the repository's
            README or their names assign to it; ``@/{task}`` in the repository's default configuration.
    """

    hub_id: str | None = None
    revision: str | None = None
    file: str = "{task}.jsonl"

    def check(self, key: str = "dataset.source") -> None:
        """Raise ConfigError if the repository's name is not ``OWNER/NAME``; `key` is the option's name in messages."""
        if self.hub_id is not None and self.hub_id.count("/") != 1:
            raise ConfigError(f"{key}.hub_id", self.hub_id, "is not a valid repository name", hint="write OWNER/NAME")
