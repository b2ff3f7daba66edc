"""Digests of the content of checkpoints; digests of large files are cached, so that each is read once."""

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
from kvbench.util.table import size as in_words

#: suffixes of the files that decide what a checkpoint computes
SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt")
#: bytes above which a file is hashed separately and its digest is cached
LARGE = 32 << 20
#: bytes to read above which the user is informed
SLOW = 2 << 30
#: seconds without a change before a file's digest is cached (two changes within one clock tick look like one)
SETTLED_S = 2.0

_BLOCK = 1 << 20
_THREADS = 8

Say = Callable[[str], None]

#: digests computed by this process, in case the cache file cannot be written (each job of a sweep asks again)
_memory: dict[str, str] = {}


def fingerprint(
    folder: Path | None, say: Say = lambda line: None, *, suffixes: Iterable[str] = SUFFIXES[:-1], deep: bool = False
) -> str | None:
    """Return a checksum of a checkpoint's files, which goes into the run's id: 16 hexadecimal digits.

    It depends on the files' names and content but not on the folder's path, so runs stay valid if a checkpoint is
    moved. It is None if the folder is None or does not exist.

    Args:
        say: function that shows a line to the user; it is called if more than 2 GiB have to be read.
        suffixes: endings of the names of the files to include.
        deep: True to include files in subfolders.

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


def sha256(file: Path, say: Say = lambda line: None) -> str:
    """Return the SHA-256 of a file's content; that of a large file is cached on disk, so that the file is read once."""
    return _digests([file], file, say)[file]


def cache_folder() -> Path:
    """Return the folder that ``KVBENCH_CACHE`` in the environment names, or else one in the user's cache folder."""
    root = os.environ.get("KVBENCH_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "kvbench"
    )
    return Path(root)


def cache_file() -> Path:
    """Return the path of the file that caches the checksums of large weight files."""
    return cache_folder() / "weights.json"


def _digests(files: list[Path], folder: Path, say: Say) -> dict[Path, str]:
    """Return the SHA-256 of each file, from the cache if possible; failure to write the cache is ignored."""
    if not files:
        return {}
    cached = _read_fingerprints(cache_file()) | _memory
    states = {file: _file_state(file) for file in files}
    known = {file: cached[state] for file, state in states.items() if state in cached}
    left = [file for file in files if file not in known]
    total = sum(file.stat().st_size for file in left)
    if total > SLOW:
        say(
            f"{folder}: reading {in_words(total)} of weights to compute the checkpoint's checksum; "
            "this happens only once"
        )
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:  # hashing lets other threads run
        new = dict(zip(left, pool.map(_file_digest, left), strict=True))
    settled = {
        states[file]: digest
        for file, digest in new.items()
        if states[file] == _file_state(file) and time.time() - file.stat().st_mtime > SETTLED_S
    }
    _memory.update(settled)
    if settled:
        with suppress(OSError):
            cache_file().parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(
                cache_file(), json.dumps({**_read_fingerprints(cache_file()), **settled}, indent=0).encode()
            )
    return known | new


def _file_state(file: Path) -> str:
    """Return a cache key that changes with the file: path, size, mtime and ctime (which users cannot set) in ns."""
    about = file.stat()
    return f"{file.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as handle:
        while block := handle.read(16 * _BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _read_fingerprints(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str) and len(value) == 64}
