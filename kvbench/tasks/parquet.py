"""Records of parquet files, read by the package `datasets` (Lhoest et al. 2021), a few rows at a time.

Shards are read one after the other, as the hub stores a split. `datasets` is imported on first use, which takes
seconds. As used here, it does not write to its own cache or use the network.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.errors import DataError
from kvbench.tasks.files import DAMAGE, MAX_FILE, Found, limit, too_large
from kvbench.tasks.records import Record

#: number of rows unpacked at a time: few, because all of them may refer to the same long text
_ROWS = 16


def parquet_records(file: Found) -> Iterator[Record]:
    """Yield the rows of a parquet file, or of all shards of a split in order, as dicts.

    The files may be gzipped or inside an archive.

    Raises:
        DataError: the package `datasets` is not installed, a shard cannot be read, the shards have different columns,
            or the rows together take more memory than :data:`kvbench.tasks.files.MAX_FILE`.
    """
    try:
        import datasets
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.dataset  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs {error.name}.\n  hint: pip install datasets") from error
    most, total = limit(MAX_FILE), 0
    try:
        with tempfile.TemporaryDirectory() as folder, silenced(), _on_disk(file, Path(folder)) as files:
            stream = datasets.load_dataset(
                "parquet",
                data_files={"rows": [glob.escape(str(path)) for path in files]},
                split="rows",
                streaming=True,
                cache_dir=folder,
                batch_size=_ROWS,
                fragment_scan_options=pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True),
            )
            for batch in stream.with_format("arrow").iter(batch_size=_ROWS):
                total += batch.nbytes
                if total > most:
                    raise too_large(file)
                yield from batch.to_pylist()
    except (*DAMAGE, pyarrow.ArrowException, TypeError, OverflowError) as error:
        if isinstance(error, MemoryError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file} cannot be read: {reason}.\n  hint: download the file again") from error


@contextmanager
def _on_disk(file: Found, folder: Path) -> Iterator[list[Path]]:
    """Yield the paths of the shards; a member of an archive and a gzipped file are unpacked into `folder`.

    Raises:
        DataError: a file is missing or not regular, cannot be unpacked, or is larger than the limit.
    """
    files = []
    for number, part in enumerate(file.each()):
        if part.member is None and part.path.suffix != ".gz":
            part.check()
            files.append(part.path.absolute())
        else:
            unpacked = folder / f"{number}.parquet"
            unpacked.write_bytes(part.content())
            files.append(unpacked)
    yield files


@contextmanager
def silenced() -> Iterator[None]:
    """Stop the package `datasets` from logging and from reporting its use, inside a ``with`` block.

    Without this, `datasets` sends a report of each use over the network, for which it may wait up to three seconds. Its
    exceptions are raised as usual.
    """
    from datasets import config
    from datasets.utils import logging

    level, counts = logging.get_verbosity(), config.HF_UPDATE_DOWNLOAD_COUNTS
    logging.set_verbosity(logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        logging.set_verbosity(level)
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts
