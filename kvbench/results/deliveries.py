"""The record of what loggers have sent, in the folder of a run or of a sweep: a digest for each destination."""

from __future__ import annotations

import json
from pathlib import Path

from kvbench.results.samples import write_atomically

_FILE = ".delivered.json"


def sent(folder: Path) -> dict[str, str]:
    """Return the digest of the content last sent to each destination; empty if nothing was sent.

    A delivery to a folder of this machine that has been deleted since counts as not sent.
    """
    return {
        place: digest
        for place, (digest, local) in _read_deliveries(folder).items()
        if local is None or Path(local).is_dir()
    }


def record_delivery(folder: Path, destination: str, digest: str, local: Path | None = None) -> None:
    """Record that content with this digest was sent to a destination.

    `folder`, that of the run or of the sweep, gets the record. `local` is the folder on this machine that holds what
    was sent; None if a service has it.

    Raises:
        DiskError: the record cannot be written.
    """
    entries = {**_read_deliveries(folder), destination: (digest, local and str(local))}
    text = json.dumps({place: list(entry) if entry[1] else entry[0] for place, entry in entries.items()}, indent=2)
    write_atomically(folder / _FILE, (text + "\n").encode())


def _read_deliveries(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Return digest and local folder by destination; the folder is None for a destination on another machine."""
    try:
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, tuple[str, str | None]] = {}
    for place, entry in content.items() if isinstance(content, dict) else ():
        match entry:
            case str():
                found[place] = entry, None
            case [str(digest), str(local)]:
                found[place] = digest, local
    return found
