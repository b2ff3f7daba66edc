"""The files of a split and its shards, as the package `datasets` resolves them from a repository's README and names.

The package is given a folder of empty files with the names of the repository's files. It then applies its rules without
using the network, where its retries would take half a minute. The files themselves are downloaded by `kvbench.hub`.

Shards are files named ``STEM-00000-of-00002.parquet``, into which the hub divides large splits; some uploads add a
digest: ``test-00000-of-00001-29a571947c0b5ccc.parquet``.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from kvbench.errors import DataError
from kvbench.hub.repository import HubError
from kvbench.tasks.formats import silenced

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?\.parquet")


def whole_split(files: Sequence[str], wanted: str, what: str, place: object) -> list[str]:
    """Return the files that a name or pattern has matched, sorted, if they are one file or all shards of one split.

    There must be at least one. `wanted` (the name or pattern), `what` (the data set) and `place` (the folder or
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
