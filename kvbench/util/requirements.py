"""Checks that what a configuration value requires (a package, a GPU, a path) is available, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from kvbench.errors import ConfigError

#: device files of GPUs under Linux (NVIDIA's own driver, AMD's, WSL's, Tegra's)
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/nvmap")

#: longest name of a file in bytes, so that the name of its temporary file fits too
LONGEST_NAME = 200


@dataclass(frozen=True)
class Package:
    """An optional Python package, and the configuration value that needs it.

    Args:
        module: name under which the package is imported.
        key: configuration key of that value, for example ``method.encoder``.
        value: the value that needs the package, for example ``bm25``.
        hint: what the user can do: how to install the package, or what to choose instead.
    """

    module: str
    key: str
    value: str
    hint: str


def installed(module: str) -> bool:
    """Return True if a Python module can be found for import; the module itself is not imported."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing, or is a plain module
        return False


def check_packages(packages: Iterable[Package]) -> None:
    """Raise ConfigError if a package is not installed; the error names the first such package."""
    for package in packages:
        if not installed(package.module):
            raise ConfigError(
                package.key,
                package.value,
                f"needs the package {package.module.removeprefix('hydra_plugins.')}, which is not installed",
                hint=package.hint,
            )


def has_gpu() -> bool:
    """Return False if this machine surely has no usable GPU, and True if it has one or may have one.

    This does not import torch. If torch is already imported, its answer counts. Otherwise a GPU is assumed if Linux has
    a device file for one, and always on other systems. An empty or -1 ``CUDA_VISIBLE_DEVICES`` means no GPU.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if "torch" in sys.modules:
        return bool(sys.modules["torch"].cuda.is_available())
    if not sys.platform.startswith("linux"):
        return True
    return any(any(Path("/").glob(pattern.lstrip("/"))) for pattern in GPU_FILES)


def exists(path: str, key: str) -> bool:
    """Return True if there is a file or folder at `path`, in which ``~`` is the home folder.

    Raises:
        ConfigError: the path is too long, not accessible, a loop of links, or begins with ``~USER`` for an unknown
            user. The message names the configuration key.
    """
    try:
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(key, path, f"cannot be accessed ({reason})", hint=f"name another path: {key}=PATH") from error
    return True


def check_writable(folder: str, key: str, file: bool = False) -> None:
    """Raise ConfigError if results could not be written to a folder or file, before a long run finds out.

    The path need not exist yet; its nearest existing parent folder must then be writable. With `file`, the path is that
    of a file. The message names the configuration key.
    """
    if "://" in folder:
        what = "file" if file else "folder"
        raise ConfigError(key, folder, f"is a URL, not a {what} on this machine", hint=f"{key}={what.upper()}")
    if file:
        exists(folder, key)
        if Path(folder).exists() and not Path(folder).is_file():
            what = "folder" if Path(folder).is_dir() else "device or pipe"
            raise ConfigError(key, folder, f"is a {what}, not a file", hint=f"name a file: {key}=FILE")
        if len(os.fsencode(Path(folder).name)) > LONGEST_NAME:
            raise ConfigError(key, folder, f"has a name longer than {LONGEST_NAME} bytes", hint="choose a shorter name")
        folder = str(Path(folder).parent)
    if not folder.strip():
        raise ConfigError(key, "''", "must name a folder", hint=f"{key}=results/runs")
    try:
        path = Path(folder).expanduser().absolute()
        for place in (path, *path.parents):
            if place.exists():
                break
            if place.is_symlink():
                raise ConfigError(key, folder, f"{place} is a broken link", hint=f"name another folder: {key}=DIR")
        if not place.is_dir():
            raise ConfigError(key, folder, f"{place} is a file, not a folder", hint=f"name another folder: {key}=DIR")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(key, folder, f"{place} is not writable", hint=f"name another folder: {key}=DIR")
        with TemporaryFile(dir=place):  # root may write anywhere, but there are folders that take no files: /proc
            pass
        longest = os.pathconf(place, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
        for part in path.relative_to(place).parts:
            if len(os.fsencode(part)) > longest:
                raise ConfigError(key, folder, f"has a name longer than {longest} bytes", hint="choose a shorter name")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, an unknown user's ~
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            key, folder, f"cannot be used as a folder ({reason})", hint=f"name another folder: {key}=DIR"
        ) from error
