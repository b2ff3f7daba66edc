"""Shards of a split: files named ``STEM-00000-of-00002.parquet``, into which the hub divides large data sets.

Some uploads add a digest: ``test-00000-of-00001-29a571947c0b5ccc.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from kvbench.errors import DataError

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
