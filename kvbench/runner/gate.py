"""A gate in front of each GPU: several runs share it as long as their predicted memory fits.

Processes of one user agree through a ledger, a file per device with a lock: who is in, who waits, and how many bytes
each expects to take. Those who wait enter in the order in which they came, so that a large run is not overtaken for
ever by small ones. Entries of processes that have ended are dropped.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench.errors import ConfigError
from kvbench.util import atomic
from kvbench.util.processor import began
from kvbench.util.table import size as in_words

#: environment variable with the number of workers per GPU; the gate is in use if it is more than 1
PER_GPU = "KVBENCH_WORKERS_PER_GPU"
#: part of a device's memory that may be promised; the rest is for fragmentation and for what predictions leave out
SHARE = 0.92
#: seconds between two looks at the ledger
POLL_S = 0.5


def per_gpu() -> int:
    """Return the number of workers that a launcher runs per GPU, from the environment variable :data:`PER_GPU`.

    Raises:
        ConfigError: it is not a whole number, 1 or greater.
    """
    text = os.environ.get(PER_GPU, "").strip() or "1"
    if not text.isdecimal() or not int(text):
        raise ConfigError(PER_GPU, text, "must be a whole number, 1 or greater", hint=f"{PER_GPU}=2, or unset it")
    return int(text)


def ledger_folder() -> Path:
    """Return the folder of this user's ledgers."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"kvbench-gate-{user}"


@contextmanager
def entered(
    device: str,
    capacity: int,
    needed: int,
    say: Callable[[str], None] = lambda line: None,
    ledgers: Path | None = None,
    poll_s: float = POLL_S,
) -> Iterator[None]:
    """Wait until a device has room for a run, and reserve that room inside a ``with`` block.

    A run that needs more than the whole device enters once it would be alone there.

    Args:
        device: name of the device, the same in all processes that use it; `capacity` is its memory in bytes.
        needed: predicted bytes of the run.
        say: function that is called with a line for the user if the run has to wait.
        ledgers: folder of the ledgers; None for :func:`ledger_folder`.
    """
    ledger = _Ledger(ledgers or ledger_folder(), device)
    mark, announced = ledger.join(needed), False
    try:
        while not ledger.enter(mark, capacity):
            if not announced:
                announced = True
                say(f"waiting for {in_words(needed)} of {in_words(capacity)} on {device}, which other runs use")
            time.sleep(poll_s)
        yield
    finally:
        ledger.leave(mark)


class _Ledger:
    """The ledger of one device: entries of processes, in the order in which they came."""

    def __init__(self, place: Path, device: str) -> None:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = re.sub(r"[^\w.-]", "-", device)
        self._path, self._lock = place / f"{name}.json", FileLock(place / f"{name}.lock")

    def join(self, needed: int) -> str:
        """Add this process to those that wait, and return the mark of its entry."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        entry = {"mark": mark, "pid": os.getpid(), "began": began(os.getpid()), "bytes": int(needed), "in": False}
        with self._lock:
            self._write([*self._entries(), entry])
        return mark

    def enter(self, mark: str, capacity: int) -> bool:
        """Let an entry in if nobody waits before it and there is room; return True if it is in."""
        with self._lock:
            entries = self._entries()
            inside = sum(entry["bytes"] for entry in entries if entry["in"])
            first = next((entry for entry in entries if not entry["in"]), None)
            if first is None or first["mark"] != mark:
                return False
            if inside and inside + first["bytes"] > SHARE * capacity:
                return False
            first["in"] = True
            self._write(entries)
            return True

    def leave(self, mark: str) -> None:
        """Remove an entry."""
        with self._lock:
            self._write([entry for entry in self._entries() if entry["mark"] != mark])

    def _entries(self) -> list[dict[str, Any]]:
        """Return the entries of processes that still run."""
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        # the time of its start tells a process from a later one with the same number; None: there is no such process
        return [entry for entry in entries if began(entry["pid"]) == entry["began"] is not None]

    def _write(self, entries: list[dict[str, Any]]) -> None:
        atomic.replace_file(self._path, json.dumps(entries, indent=1).encode())
