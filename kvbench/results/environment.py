"""The environment of a run: versions, machine, commit. Does not import torch, so the caller passes the device."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kvbench.util.processor import cpu_name as cpu_name
from kvbench.util.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")


def environment(
    device: str | None = None, device_name: str | None = None, dtypes: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Describe the machine and the software versions: the content of `env.json` and of ``env`` in `metrics.json`.

    Args:
        device: torch's name of the device, for example ``cuda:0``; None before a model is loaded.
        device_name: product name of the device; None for the name of the CPU.
        dtypes: ``dtype`` (storage) and ``arithmetic`` of the model, and what else :class:`Env` says of them; None
            before a model is loaded.
    """
    return {
        "device": device,
        "device_name": device_name or cpu_name(),
        **(dtypes or {"dtype": None}),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "kvbench": __version__,
        "commit": commit(),
        **{name: _version(name) for name in _PACKAGES},
    }


@cache
def commit() -> str | None:
    """Return the git commit of the running kvbench; None if it does not run from a clone.

    A ``+`` is appended if tracked files have been edited since the commit.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
