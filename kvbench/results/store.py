"""A run's directory: `config.yaml`, `env.json`, `samples.jsonl`, `metrics.json`, held by one process at a time."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import yaml
from filelock import FileLock, Timeout

from kvbench.errors import KvbenchError
from kvbench.results import record
from kvbench.results import samples as lines
from kvbench.results.samples import DiskError, Row, Samples
from kvbench.results.typed import ShapeError
from kvbench.util import atomic

#: which loggers have the run, beside it
_DELIVERED = ".delivered.json"

STATUSES: tuple[str, ...] = get_args(record.Status)
#: of runs whose samples are all there
DONE = ("ok", "older")

Say = Callable[[str], None]


class RunStore:
    """The directory of one run.

    Reading needs no lock. Writing happens inside :meth:`hold`, so that two processes on one run do its samples once.

    Args:
        results_dir: directory of all runs, for example ``results/runs``.
        run_id: the directory's name, see :mod:`kvbench.results.identity`.
        say: takes one line for the user (damage found, waiting for another process).
    """

    def __init__(self, results_dir: Path | str, run_id: str, say: Say = lambda line: None) -> None:
        self.run_id = run_id
        self.path = Path(results_dir) / run_id
        self.say = say

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @contextmanager
    def hold(self, timeout_s: float = -1, *, quiet: bool = False) -> Iterator[None]:
        """Hold the run; waits, and says so once, while another process holds it (a killed one holds nothing).

        Args:
            timeout_s: how long to wait; negative waits for ever.
            quiet: do not say that it waits.

        Raises:
            KvbenchError: the other process still holds the run after `timeout_s`.
            DiskError: the directory or its lock cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(self.path, error) from error
        lock = FileLock(self.path / ".lock")
        holder = self.path / ".holder"
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._wait(lock, holder, timeout_s, quiet)
        except OSError as error:
            raise DiskError(self.path / ".lock", error) from error
        try:
            with suppress(OSError):  # a courtesy to who waits; a full disk is reported where a result is lost
                holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            yield
        finally:
            lock.release()

    def _wait(self, lock: FileLock, holder: Path, timeout_s: float, quiet: bool) -> None:
        """Wait for the process that holds the run."""
        who = _read_text(holder) or "another process"
        if not quiet:
            self.say(f"run {self.run_id} is held by {who}: waiting for it, then doing what is missing")
        started = time.monotonic()
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.1)
        except Timeout:
            waited = time.monotonic() - started
            raise KvbenchError(f"run {self.run_id} is still held by {who} after {waited:.0f} s.") from None

    def start(self, config: Mapping[str, Any], environment: Mapping[str, Any] | None = None) -> None:
        """Write `config.yaml` first of all, so that a directory always says what it is."""
        text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=120)
        atomic.tidy(self.path)
        lines.write_atomically(self.path / "config.yaml", text.encode())
        if environment is not None:
            self.write_environment(environment)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `env.json`, the latest session's; rows carry their own device, so timings are never mixed."""
        lines.write_atomically(self.path / "env.json", _json(environment))

    def environment(self) -> dict[str, Any] | None:
        """Return `env.json`; None if there is none or it cannot be read."""
        return _read_json(self.path / "env.json")

    def config(self) -> dict[str, Any] | None:
        """Return the configuration that the run was last started with; None if the directory has none."""
        text = _read_text(self.path / "config.yaml")
        try:
            content = yaml.safe_load(text) if text else None
        except (yaml.YAMLError, RecursionError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def samples(self) -> Samples:
        """Return all good rows; changes nothing, and is safe while another process appends."""
        return lines.read(self.samples_path)

    def recover(self) -> dict[str, Row]:
        """Return all good rows; damaged lines are reported and set aside, so that their samples are done again."""
        samples = self.samples()
        for number, _, problem in samples.damaged:
            self.say(f"{self.samples_path} line {number}: {problem}; skipped, its sample is done again")
        if samples.damaged:
            lines.repair(self.samples_path, samples)
        return samples.rows

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, fsynced: after this returns, no kill loses them. Raises DiskError."""
        lines.append(self.samples_path, rows)

    def metrics(self) -> dict[str, Any] | None:
        """Return `metrics.json` with all keys of the record; None without one, or if :meth:`problem` says why."""
        content = _read_json(self.path / "metrics.json")
        try:
            return record.filled(content)
        except ShapeError:
            return None

    def problem(self) -> str | None:
        """Return the defect of `metrics.json` that keeps reports from showing the run; None without one."""
        path = self.path / "metrics.json"
        if path.is_symlink() or path.exists():
            content = _read_json(path)
            defect = "it is not a JSON object" if content is None else record.problem(content)
            if defect:
                return f"{path}: {defect}; the same command writes it anew from samples.jsonl"
        return None

    def deliveries(self) -> dict[str, Any]:
        """Return the deliveries of loggers: destination -> digest of the metrics."""
        return _read_json(self.path / _DELIVERED) or {}

    def record_delivery(self, destination: str, digest: str) -> None:
        """Record that a logger took the metrics of this digest. Raises DiskError."""
        lines.write_atomically(self.path / _DELIVERED, _json({**self.deliveries(), destination: digest}))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json` last and atomically. Raises DiskError."""
        lines.write_atomically(self.path / "metrics.json", _json(metrics))


def find_runs(results_dir: Path | str) -> list[RunStore]:
    """Return the stores of all runs under a directory, the one touched last at the end."""
    root = Path(results_dir)
    if not root.is_dir():
        return []
    runs = []
    for path in root.iterdir():
        with suppress(OSError):  # removed in this moment, or not to be looked into
            if (path / "config.yaml").is_file():
                runs.append((path.stat().st_ctime_ns, path.name))
    return [RunStore(root, name) for _, name in sorted(runs)]


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; None if there is none or it cannot be read."""
    text = _read_text(path)
    try:
        content = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _plain(value: Any) -> Any:
    """Return nested plain data for YAML: mappings to dict, tuples to lists, the rest as it is."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
