"""A run's directory: `config.yaml`, `env.json`, `origin.json`, `samples.jsonl`, `metrics.json`.

A process that writes to the directory locks it first.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import yaml
from filelock import FileLock, Timeout

from kvbench.errors import KvbenchError
from kvbench.results import deliveries, mirror, record
from kvbench.results import samples as lines
from kvbench.results.samples import DiskError, Row, StoredSamples
from kvbench.results.typed import ShapeError
from kvbench.util import atomic

STATUSES: tuple[str, ...] = get_args(record.Status)
#: statuses of runs whose samples are all done
DONE = ("ok", "older")

Say = Callable[[str], None]

#: libyaml's loader reads a configuration ten times as fast; where PyYAML was built without it, its own one serves
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RunStore:
    """The directory of one run, with methods that read and write its files.

    Reading needs no lock. Write only inside a ``with`` block of :meth:`hold`, which locks the directory, so that two
    processes do not both compute the same samples. Methods that write raise DiskError if a file cannot be written.

    Args:
        results_dir: directory that contains the directories of all runs, for example ``results/runs``.
        run_id: id of the run, which is also the name of its directory (:mod:`kvbench.results.identity`).
        say: called with one-line messages for the user, for example about a damaged line or about waiting for another
            process.
        here: True to use the directory on this machine only, even in a job whose results another machine gathers.
    """

    def __init__(
        self, results_dir: Path | str, run_id: str, say: Say = lambda line: None, *, here: bool = False
    ) -> None:
        self.run_id = run_id
        self._mirror = None if here else mirror.current()
        self._home = Path(results_dir) / run_id  # where the run belongs; only on this machine without a mirror
        self.path = self._home if self._mirror is None else self._mirror.scratch / run_id
        self.say = say

    def sibling(self, run_id: str) -> RunStore:
        """Return another run of the same results directory."""
        return RunStore(self._home.parent, run_id, self.say)

    @property
    def samples_path(self) -> Path:
        """Path of `samples.jsonl`, which has one line per finished sample."""
        return self.path / "samples.jsonl"

    @contextmanager
    def hold(self, timeout_s: float = -1, *, quiet: bool = False) -> Iterator[None]:
        """Hold the run's lock for the duration of a ``with`` block.

        If another process holds the lock, the call shows a message (unless `quiet`) and waits for at most `timeout_s`
        seconds; a negative number waits without limit. A process that is killed leaves no lock behind, because the
        operating system releases it.

        Raises:
            KvbenchError: another process still holds the lock after `timeout_s`.
            DiskError: the directory or its lock file cannot be created.
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
            with suppress(OSError):  # only informs waiting processes; a full disk is reported when a result is lost
                holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            with self._fetched():
                yield
        finally:
            lock.release()

    @contextmanager
    def _fetched(self) -> Iterator[None]:
        """Lock the run on the machine that gathers results too, and fetch its files, inside a ``with`` block."""
        if self._mirror is None:
            yield
            return
        for name, data in self._mirror.begin(self._home).items():
            lines.write_atomically(self.path / name, data)
            os.utime(self.path / name, (0, 0))  # what an earlier job has made is not of this one
        try:
            yield
        finally:
            self._mirror.end(self._home)

    def _write(self, name: str, data: bytes) -> None:
        """Replace a file of the run, here and on the machine that gathers results. Raises DiskError."""
        lines.write_atomically(self.path / name, data)
        if self._mirror is not None:
            try:
                self._mirror.write(self._home, name, data)
            except OSError as error:
                raise DiskError(self._home / name, error) from error

    def _wait(self, lock: FileLock, holder: Path, timeout_s: float, quiet: bool) -> None:
        """Acquire the lock once the process that holds it releases it; raise KvbenchError after `timeout_s`."""
        who = _read_text(holder) or "another process"
        if not quiet:
            self.say(f"{who} is working on run {self.run_id}; waiting for it to end, then running missing samples")
        started = time.monotonic()
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.1)
        except Timeout:
            waited = time.monotonic() - started
            raise KvbenchError(
                f"{who} is still working on run {self.run_id} after {waited:.0f} s.\n  hint: wait until "
                "that process ends, or stop it"
            ) from None

    def start(self, config: Mapping[str, Any], environment: Mapping[str, Any] | None = None) -> None:
        """Write `config.yaml`, without which a directory does not count as a run; call this before all other writes.

        Temporary files that an interrupted process has left in the directory are removed. Without `environment` (None),
        `env.json` stays as it is.
        """
        text = yaml.safe_dump(_yaml_data(config), sort_keys=False, allow_unicode=True, width=120)
        atomic.tidy(self.path)
        self._write("config.yaml", text.encode())
        if environment is not None:
            self.write_environment(environment)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `env.json`, which describes the machine and the package versions of the latest command for this run.

        The devices of earlier samples stay known, because each row of `samples.jsonl` records its device.
        """
        self._write("env.json", _json(environment, sort_keys=True))

    def environment(self) -> dict[str, Any] | None:
        """Return the content of `env.json`, machine and package versions; None if the file is missing or unreadable."""
        return _read_json(self.path / "env.json")

    def origin(self) -> dict[str, Any]:
        """Return `origin.json`, commits and checksums of the run's files from the hub; empty if unreadable."""
        return _read_json(self.path / "origin.json") or {}

    def write_origin(self, origin: Mapping[str, Any]) -> None:
        """Write `origin.json`, the commits and checksums of the run's files from the hub. Raises DiskError."""
        self._write("origin.json", _json(origin))

    def config(self) -> dict[str, Any] | None:
        """Return the configuration with which the run was last started; None if `config.yaml` cannot be read."""
        text = _read_text(self.path / "config.yaml")
        try:
            content = yaml.load(text, Loader=_LOADER) if text else None
        except (yaml.YAMLError, RecursionError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def rerun(self) -> dict[str, Any]:
        """Return the content of `rerun.json`, the latest repetition of the run's samples; empty if there was none."""
        return _read_json(self.path / "rerun.json") or {}

    def write_rerun(self, noted: Mapping[str, Any]) -> None:
        """Write `rerun.json`. Raises DiskError."""
        self._write("rerun.json", _json(noted))

    def samples(self) -> StoredSamples:
        """Return the rows of `samples.jsonl` and a list of its damaged lines, without changing the file.

        It is safe to call this while another process appends rows.
        """
        return lines.read_samples(self.samples_path)

    def recover(self) -> dict[str, Row]:
        """Return all valid rows by sample id, and remove damaged lines from `samples.jsonl`.

        Each damaged line is reported to the user and moved to `samples.damaged`; its sample has to be run again. Call
        this only inside :meth:`hold`.
        """
        samples = self.samples()
        for number, _, problem in samples.damaged:
            self.say(f"{self.samples_path} line {number}: {problem}; the line is ignored and its sample is repeated")
        if samples.damaged:
            lines.repair(self.samples_path, samples)
            if self._mirror is not None:
                self._write(self.samples_path.name, self.samples_path.read_bytes())
        return samples.rows

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to `samples.jsonl`, and return once they are on disk. Raises DiskError."""
        lines.append(self.samples_path, rows)
        if self._mirror is not None:
            try:
                self._mirror.append(self._home, b"".join(map(lines.encode_row, rows)))
            except OSError as error:
                raise DiskError(self._home / self.samples_path.name, error) from error

    def arrange(self, order: Sequence[str]) -> None:
        """Rewrite `samples.jsonl` with the rows of some samples in the given order of sample ids, after all other rows.

        Rows that several processes computed are thus in the order in which one process would have written them. No row
        is lost: if the file cannot be rewritten, it stays as it is.
        """
        rows = self.samples().rows
        last = {name: rows[name] for name in order if name in rows}
        arranged = {**{name: row for name, row in rows.items() if name not in last}, **last}
        if list(arranged) != list(rows):
            with suppress(DiskError):
                self._write(self.samples_path.name, b"".join(lines.encode_row(row) for row in arranged.values()))

    def keep_only(self, names: Collection[str]) -> None:
        """Remove from `samples.jsonl` the rows of all samples except those with the ids `names`. Raises DiskError."""
        rows = self.samples().rows
        if not rows.keys() <= set(names):
            self._write(
                self.samples_path.name, b"".join(lines.encode_row(row) for name, row in rows.items() if name in names)
            )

    def metrics(self) -> dict[str, Any] | None:
        """Return `metrics.json`, with defaults for keys that older versions did not write; None if invalid."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[dict[str, Any] | None, str | None]:
        """Return :meth:`metrics` and :meth:`problem`, for which the file is read once."""
        path = self.path / "metrics.json"
        content = _read_json(path)
        if content is None:
            defect = "it is not a JSON object" if path.is_symlink() or path.exists() else None
        else:
            try:
                return record.fill_defaults(content), None
            except ShapeError as error:
                defect = str(error)
        return None, defect and f"{path}: {defect}; run the same command again to rewrite it from samples.jsonl"

    def problem(self) -> str | None:
        """Return a message that says what is wrong with `metrics.json`; None if the file is valid or missing."""
        return self.read_metrics()[1]

    def deliveries(self) -> dict[str, Any]:
        """Return which metrics loggers have sent: for each destination, the digest of the metrics last sent there.

        A destination on this machine whose folder has been deleted since is left out.
        """
        return deliveries.sent(self.path)

    def record_delivery(self, destination: str, digest: str, local: Path | None = None) -> None:
        """Record that a logger has sent the run's metrics, so that it does not send the same metrics there again.

        `destination` names the place (:meth:`kvbench.loggers.base.Logger.destination`). `local` is the folder on this
        machine that holds what was sent (:attr:`kvbench.loggers.base.Logger.local`); None if a service has it.
        """
        deliveries.record_delivery(self.path, destination, digest, local)

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json` atomically; it is written after all other files of a run. Raises DiskError."""
        self._write("metrics.json", _json(metrics))


def find_runs(results_dir: Path | str) -> list[RunStore]:
    """Return the runs in a directory, ordered by the time of the last change, newest last; none if it is missing."""
    root = Path(results_dir)
    if not root.is_dir():
        return []
    runs = []
    for path in root.iterdir():
        with suppress(OSError):  # removed meanwhile, or not accessible
            if (path / "config.yaml").is_file():
                runs.append((path.stat().st_ctime_ns, path.name))
    return [RunStore(root, name) for _, name in sorted(runs)]


def _json(content: Mapping[str, Any], sort_keys: bool = False) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False, sort_keys=sort_keys) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, unreadable or not an object."""
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


def _yaml_data(value: Any) -> Any:
    """Return data that YAML can dump: mappings become dicts, tuples lists, other objects strings."""
    if isinstance(value, Mapping):
        return {str(key): _yaml_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_yaml_data(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
