"""Where the configuration lies: inside the installed package (``kvbench/conf``), or beside it in a working tree."""

from __future__ import annotations

from pathlib import Path

from kvbench.errors import KvbenchError


def conf_dir() -> Path:
    """The folder of ``config.yaml`` and of the groups.

    Raises:
        KvbenchError: there is none, so the installation is broken.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise KvbenchError(f"kvbench's configuration is missing beside {package}.\n  hint: install again: pip install -e .")


def groups() -> list[str]:
    """Names of the configuration groups (``model``, ``method``, ...), the folders of :func:`conf_dir`."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and any(p.rglob("*.yaml")))


def options(group: str) -> list[str]:
    """Choices of a group, for example ``options("dataset") == ["mini", "mini/full", ...]``."""
    folder = conf_dir() / group
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def summary(group: str, option: str) -> str:
    """The line that says what a choice is: the first comment in its YAML (Hydra's own headers apart)."""
    for line in (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""
