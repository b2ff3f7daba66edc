"""Files that are replaced atomically: a reader sees the old content or the new, never a part."""

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
#: characters of a file's own name, and of the machine's, in those names (of at most 255 bytes)
KEPT, HOST = 40, 20
#: seconds after which another machine's unfinished file counts as abandoned
ABANDONED_S = 24 * 3600.0

_WRITER = re.compile(rf"\.(?P<host>[\w-]*)\.(?P<process>\d+)\.\d+{re.escape(ENDING)}$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to, which replaces `path` at the end of the block.

    The name belongs to this thread alone: two writers with one name would truncate each other's file, and the first to
    finish would publish half of the other's. If the block fails, `path` is unchanged and the new file is removed. What
    a killed writer of `path` left behind is removed first.

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
    """Remove what killed writers left in `folder`; only for the one process that writes there."""
    for partial in folder.glob(f".*{ENDING}"):
        with suppress(OSError):
            partial.unlink()


def write(path: Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk (fsync); raise OSError, with `path` unchanged."""
    with replacing(path) as partial, partial.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _beginning(path: Path) -> str:
    return f".{path.name[:KEPT]}."


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:HOST]


def _sweep(path: Path) -> None:
    """Remove partial files of `path` whose writers are gone."""
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
    """Return True if the writer of `partial` is gone: its process, or on another machine for a day."""
    writer = _WRITER.fullmatch("." + partial.name.removeprefix(beginning))
    if writer is not None and writer["host"] == _host():
        try:
            os.kill(int(writer["process"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            pass  # another user's
        return False
    try:
        return time.time() - partial.stat().st_mtime > ABANDONED_S
    except OSError:
        return False
