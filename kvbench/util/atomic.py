"""Atomic replacement of files: a reader sees the complete old or the complete new content."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: ending of the names of unfinished files
ENDING = ".partial"
#: how many characters of the target's name and of the host's go into such a name (file names have at most 255 bytes)
KEPT, HOST = 40, 20
#: seconds after which another machine's unfinished file counts as abandoned
ABANDONED_S = 24 * 3600.0

_WRITER = re.compile(rf"\.(?P<host>[\w-]*)\.(?P<process>\d+)\.\d+{re.escape(ENDING)}$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Let a ``with`` block write a temporary file, which replaces `path` atomically when the block ends.

    The block receives the temporary path. If it raises an exception, `path` is unchanged and the temporary file is
    removed. The name is unique to this process and thread, so concurrent writers of `path` do not disturb each other.
    Temporary files that killed writers of `path` have left behind are removed first.

    Raises:
        OSError: `path` is a folder, or cannot be replaced.
    """
    if not path.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    _sweep(path)
    partial = path.with_name(f"{_beginning(path)}{_host()}.{os.getpid()}.{threading.get_ident()}{ENDING}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def tidy(folder: Path) -> None:
    """Remove all temporary files of this module in `folder`; call it only while no process writes there."""
    for partial in folder.glob(f".*{ENDING}"):
        with suppress(OSError):
            partial.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data` atomically, and flush it to disk; an OSError leaves `path` unchanged."""
    with replacing(path) as partial, partial.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _beginning(path: Path) -> str:
    return f".{path.name[:KEPT]}."


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:HOST]


def _sweep(path: Path) -> None:
    """Remove temporary files of `path` whose writers no longer run."""
    beginning = _beginning(path)
    try:
        names = os.listdir(path.parent)
    except OSError:
        return
    for name in names:
        if name.startswith(beginning) and name.endswith(ENDING) and _abandoned(path.with_name(name), beginning):
            with suppress(OSError):
                path.with_name(name).unlink()


def _abandoned(partial: Path, beginning: str) -> bool:
    """Return True if the process that wrote `partial` has ended; on another machine, if the file is over a day old."""
    writer = _WRITER.fullmatch("." + partial.name.removeprefix(beginning))
    if writer is not None and writer["host"] == _host():
        try:
            os.kill(int(writer["process"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            pass  # the process runs, as another user
        return False
    try:
        return time.time() - partial.stat().st_mtime > ABANDONED_S
    except OSError:
        return False
