"""Output of the bench: JSON files with the device and the versions, rewritten as rows come, and reasons of failures.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results import environment
from kvbench.util import atomic
from kvbench.util.failures import is_out_of_memory
from kvbench.util.requirements import check_writable

Row = dict[str, Any]
#: packages whose versions the JSON file records
PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "cuda-bindings", "hqq", "optimum-quanto")


class Recording:
    """The JSON file of a command that measures: what was measured, the machine, and the rows so far.

    ``--out`` and ``--name`` give its path; `name` is the default of ``--name``. `about` has further entries of the
    file; callers may add more to :attr:`about` until the last :meth:`write`.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, args: argparse.Namespace, name: str, what: str, **about: Any) -> None:
        self.path, self.began = json_file(args, name), time.perf_counter()
        check_writable(str(self.path.parent), "--out")
        self.about: dict[str, Any] = {"what": what, **machine(), "command": " ".join(args.argv), **about}
        self.rows: list[Row] = []

    def write(self) -> None:
        """Write the file with all rows so far; KvbenchError if it cannot be written."""
        write_json(self.path, {**self.about, "rows": self.rows})

    def say(self, cells: Iterable[Any]) -> None:
        """Print a row's table cells, without those that are None, as a line of progress."""
        shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells if cell is not None)
        print("  ".join(shown), flush=True)

    def end(self) -> None:
        """Print the file's path and the seconds since the beginning."""
        print(f"{self.path} ({time.perf_counter() - self.began:.0f} s)")


def json_file(args: argparse.Namespace, name: str) -> Path:
    """Return the path of a command's JSON file.

    ``--out`` is the file itself if it ends in .json. Otherwise the file is ``--name`` (default `name`) in the folder
    ``--out`` (default :func:`result_folder`).
    """
    if args.out is not None and args.out.suffix == ".json":
        return Path(args.out)
    return result_folder(args.out) / f"{getattr(args, 'name', None) or name}.json"


def result_folder(out: Path | None) -> Path:
    """Return the folder for the JSON file: `out`, or if that is None, one named after the device (``results/h200``)."""
    if out is not None:
        return out
    import torch

    if not torch.cuda.is_available():
        return Path("results") / "cpu"
    name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(0).lower().replace("nvidia", "")).strip("_")
    return Path("results") / name


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, and create its folder if needed; KvbenchError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise KvbenchError(f"{path} cannot be written: {error}\n  hint: name another file with --out FILE") from error


def failure_reason(error: Exception, most: int = 120) -> str:
    """Return the kind and message of an error on one line, the latter cut after `most` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def failed_row(error: Exception) -> Row:
    """Return the status of a row whose measurement failed, ``oom`` or ``failed``, and the reason as ``message``.

    Raises:
        KvbenchError: `error` is a KvbenchError: a mistake of the user is not recorded as a failed row.
    """
    if isinstance(error, KvbenchError):
        raise error
    return {"status": "oom" if is_out_of_memory(error) else "failed", "message": failure_reason(error, 300)}


def machine() -> dict[str, Any]:
    """Describe this machine for the JSON file: device, driver, package versions, git commit and date, by name."""
    import torch

    return {
        **described_device(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES if version(name)},
        "commit": environment.commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def described_device() -> dict[str, Any]:
    """Describe the first GPU: its name, multiprocessors, memory, L2 cache and driver; without a GPU the CPU's name."""
    import torch

    if not torch.cuda.is_available():
        return {"device": environment.cpu_name()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory_GiB": round(properties.total_memory / 2**30, 1),
        "L2_MiB": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        "driver": driver(),
    }


def driver() -> str | None:
    """Return the version of the GPU driver from nvidia-smi; None if that fails."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def healthy() -> bool:
    """Return True if CUDA still works in this process; after an illegal memory access it does not."""
    import torch

    try:
        torch.cuda.synchronize()
        return int(torch.ones(2, device="cuda").sum()) == 2
    except Exception:
        return False
