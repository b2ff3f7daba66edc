"""The folder of the configuration: in the installed package (``kvbench/conf``), or next to it in a working tree."""

from __future__ import annotations

from pathlib import Path

from kvbench.errors import KvbenchError


def conf_dir() -> Path:
    """Return the folder of ``config.yaml`` and of the groups.

    Raises:
        KvbenchError: it is missing, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise KvbenchError(
        f"kvbench's configuration is missing next to {package}.\n  hint: install again: pip install -e ."
    )


def groups() -> list[str]:
    """Return the names of the configuration groups (``model``, ``method``, ...), the folders of :func:`conf_dir`."""
    return sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and any(p.rglob("*.yaml")))


def options(group: str, extra: Path | None = None) -> dict[str, Path]:
    """Return the choices of a group and their files, such as ``{"mini": .../dataset/mini.yaml, "mini/full": ...}``.

    Args:
        group: a folder of :func:`conf_dir`.
        extra: a folder with the same layout whose choices are added (``--config-dir``).
    """
    choices: dict[str, Path] = {}
    for folder in (conf_dir() / group, *([extra / group] if extra else [])):
        choices |= {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}
    return dict(sorted(choices.items()))


def summary(path: Path) -> str:
    """Return the description of a choice: the first comment in its YAML, apart from Hydra's headers."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""
