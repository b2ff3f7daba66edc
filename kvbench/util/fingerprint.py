"""Digests of a checkpoint's content, every byte of it; those of large files are kept, so that they are read once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kvbench.util import atomic
from kvbench.util.cells import size as in_words

#: endings of the files that decide what a checkpoint computes
SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt")
#: files above this are hashed by themselves, and their digest is kept
LARGE = 32 << 20
#: bytes to be read from which on the user is told
SLOW = 2 << 30
#: seconds that a file must have been left alone for its digest to be kept: a clock's tick may hide a second change
SETTLED_S = 2.0

_BLOCK = 1 << 20
_THREADS = 8

Say = Callable[[str], None]

#: digests of this process, for where no file can keep them (a sweep asks once a job)
_memory: dict[str, str] = {}


def fingerprint(
    folder: Path | None, say: Say = lambda line: None, *, suffixes: Iterable[str] = SUFFIXES[:-1], deep: bool = False
) -> str | None:
    """Digest of a checkpoint, so that another one under the same name is another run; None where there is no folder.

    The place of the folder is not in it: a moved checkpoint keeps its runs.

    Args:
        folder: of the checkpoint.
        say: takes one line for the user, where many gigabytes are to be read.
        suffixes: of the files that count.
        deep: files of subfolders count too.

    Raises:
        OSError: a file cannot be read.
    """
    if folder is None or not folder.is_dir():
        return None
    files = sorted(folder.rglob("*") if deep else folder.iterdir())
    files = [file for file in files if file.suffix in tuple(suffixes) and file.is_file()]
    large = [file for file in files if file.stat().st_size > LARGE]
    known = _digests(large, folder, say)
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(folder).as_posix()
        digest.update(f"{name}:{file.stat().st_size}:".encode())
        digest.update(known[file].encode() if file in known else file.read_bytes())
    return digest.hexdigest()[:16]


def cache_file() -> Path:
    """Where digests are kept: in ``KVBENCH_CACHE``, else in the user's cache folder."""
    root = os.environ.get("KVBENCH_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "kvbench"
    )
    return Path(root) / "weights.json"


def _digests(files: list[Path], folder: Path, say: Say) -> dict[Path, str]:
    """Digests of whole files; a place that cannot be written costs time, not the run."""
    if not files:
        return {}
    kept = _read(cache_file()) | _memory
    states = {file: _state(file) for file in files}
    found = {file: kept[state] for file, state in states.items() if state in kept}
    left = [file for file in files if file not in found]
    total = sum(file.stat().st_size for file in left)
    if total > SLOW:
        say(f"{folder}: reading {in_words(total)} of weights once, to tell this checkpoint from any other")
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:  # hashing lets other threads run
        new = dict(zip(left, pool.map(_whole, left), strict=True))
    settled = {
        states[file]: digest
        for file, digest in new.items()
        if states[file] == _state(file) and time.time() - file.stat().st_mtime > SETTLED_S
    }
    _memory.update(settled)
    if settled:
        with suppress(OSError):
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            atomic.write(cache_file(), json.dumps({**_read(cache_file()), **settled}, indent=0).encode())
    return found | new


def _state(file: Path) -> str:
    """What changes with a file's content: its size, and its times to the nanosecond (users cannot set the second)."""
    about = file.stat()
    return f"{file.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def _whole(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as handle:
        while block := handle.read(16 * _BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str) and len(value) == 64}
