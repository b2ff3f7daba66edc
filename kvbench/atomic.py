"""Files that change as a whole: whoever reads one sees the old content or the new, never a part."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: of names that hold what is not whole yet
ENDING = ".partial"
#: characters of a file's own name in them (a name has room for 255 bytes)
KEPT = 40


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; at the end of the block it takes the place of `path`.

    The name belongs to this thread alone: two writers that shared one would empty each other's file, and the first to
    finish would put the other's half in place. Where the block fails, `path` is as it was and nothing is left beside.

    Raises:
        OSError: `path` is a folder, or cannot be replaced.
    """
    if not path.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name[:KEPT]}.{os.getpid()}.{threading.get_ident()}{ENDING}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def tidy(folder: Path) -> None:
    """Remove what killed writers left in `folder`; for whoever is the only one to write there."""
    for partial in folder.glob(f".*{ENDING}"):
        with suppress(OSError):
            partial.unlink()


def write(path: Path, data: bytes) -> None:
    """Write a file, whole and on the disk (fsync) when this returns. Raises OSError; `path` is then as it was."""
    with replacing(path) as partial, partial.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
