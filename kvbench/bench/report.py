"""Output of the bench: a JSON file with the device and the versions, and the lines of the table."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvbench.util import atomic

#: packages whose versions the JSON file records
PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "cuda-bindings", "hqq", "optimum-quanto")


def machine() -> dict[str, Any]:
    """Describe this machine for the JSON file: device, driver, package versions, git commit and date, by name."""
    return {
        **describe_device(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES if version(name)},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def describe_device() -> dict[str, Any]:
    """Describe the first GPU: its name, multiprocessors, memory, L2 cache and driver; without a GPU the CPU's name."""
    if not torch.cuda.is_available():
        from kvbench.results.environment import cpu_name

        return {"device": cpu_name()}
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


def commit() -> str | None:
    """Return the git commit of the source tree; None if unknown."""
    from kvbench.results.environment import commit as found

    return found()


def result_folder(out: Path | None) -> Path:
    """Return the folder for the JSON file: `out`, or if that is None, one named after the device (``results/h200``)."""
    if out is not None:
        return out
    if not torch.cuda.is_available():
        return Path("results") / "cpu"
    name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(0).lower().replace("nvidia", "")).strip("_")
    return Path("results") / name


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def healthy() -> bool:
    """Return True if CUDA still works in this process; after an illegal memory access it does not."""
    try:
        torch.cuda.synchronize()
        return int(torch.ones(2, device="cuda").sum()) == 2
    except Exception:
        return False
