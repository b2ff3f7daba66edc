"""The configuration folder: ``kvbench/conf`` in an installed package, ``conf`` next to it in a working tree."""

from __future__ import annotations

from pathlib import Path

from kvbench.errors import KvbenchError


def conf_dir() -> Path:
    """Return the folder that contains ``config.yaml`` and the groups.

    Raises:
        KvbenchError: there is no such folder; the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise KvbenchError(f"kvbench's configuration is missing next to {package}.\n  hint: run pip install -e . again")


def groups() -> list[str]:
    """Return the names of the configuration groups (``model``, ``method``, ...), the folders of :func:`conf_dir`."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and any(p.rglob("*.yaml")))


def options(group: str, extra: Path | None = None) -> dict[str, Path]:
    """Return the choices of a group with their files, such as ``{"mini": .../dataset/mini.yaml, "mini/full": ...}``.

    Args:
        group: a folder of :func:`conf_dir`.
        extra: another configuration folder (``--config-dir``), whose choices are added.
    """
    choices: dict[str, Path] = {}
    for folder in (conf_dir() / group, *([extra / group] if extra else [])):
        choices |= {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}
    return dict(sorted(choices.items()))


def summary(path: Path) -> str:
    """Return the description of a choice: the first comment in its YAML file other than ``# @package``; else empty."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""
