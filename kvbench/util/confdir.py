"""The configuration folder: ``kvbench/conf`` in an installed package, ``conf`` next to it in a working tree."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import KvbenchError


def conf_dir() -> Path:
    """Return kvbench's own configuration folder, which contains ``config.yaml`` and one folder per configuration group.

    Raises:
        KvbenchError: the folder is missing, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise KvbenchError(f"kvbench's configuration is missing next to {package}.\n  hint: run pip install -e . again")


def groups() -> list[str]:
    """Return the names of the configuration groups, such as ``model``, which are the folders in :func:`conf_dir`."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and any(p.rglob("*.yaml")))


def options(group: str, extra: Path | None = None) -> dict[str, Path]:
    """Return the values that a configuration group can be set to, in alphabetical order, each with its YAML file.

    A value is the file's path in the group's folder without its ending: ``mini/full`` for ``dataset/mini/full.yaml``.
    The files of `extra`, the user's own configuration folder (``--config-dir``), are added, and replace files of the
    same name.
    """
    choices: dict[str, Path] = {}
    for folder in (conf_dir() / group, *([extra / group] if extra else [])):
        choices |= {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}
    return dict(sorted(choices.items()))


def read_choice(path: Path) -> dict[str, Any]:
    """Return what a YAML file of the configuration holds, for the caller to change; empty if that is no mapping."""
    return deepcopy(_parsed(path.read_text(encoding="utf-8")))


@lru_cache(maxsize=512)
def _parsed(text: str) -> dict[str, Any]:
    # by text and not by path: parsing takes a hundred times as long as reading, and files may change
    data = yaml.safe_load(text)
    return data if isinstance(data, dict) else {}


def summary(path: Path) -> str:
    """Return the one-line description in a YAML file of the configuration; empty if it has none.

    It is the first line that begins with ``#``, apart from Hydra's ``# @package`` lines.
    """
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""
