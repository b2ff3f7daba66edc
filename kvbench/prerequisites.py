"""What a configuration needs of the machine that it runs on: packages, a GPU, files. Looks, and imports nothing heavy.

A run asks before it touches data or a model, the command line before it starts anything. A launcher that sends jobs to
other machines (submitit) leaves the GPU to them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import ConfigError

if TYPE_CHECKING:
    from kvbench.config import RunConfig

#: what a GPU of any maker looks like to Linux (NVIDIA's own driver, AMD's, WSL's, Tegra's)
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/nvmap")
#: launchers that are plugins, and those that run their jobs on other machines
PLUGINS = {"joblib": "hydra_plugins.hydra_joblib_launcher", "submitit": "hydra_plugins.hydra_submitit_launcher"}
REMOTE = ("submitit",)


@dataclass(frozen=True)
class Package:
    """A package that one choice needs.

    Args:
        module: as it is imported.
        key, value: the choice, for example ``method.encoder`` and ``bm25``.
        hint: what installs it, or what to choose instead.
    """

    module: str
    key: str
    value: str
    hint: str


def installed(module: str) -> bool:
    """Whether `module` could be imported; it is not."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is no package
        return False


def check_packages(packages: Iterable[Package]) -> None:
    """Raise ConfigError for the first package that is not installed."""
    for package in packages:
        if not installed(package.module):
            raise ConfigError(
                package.key,
                package.value,
                f"needs the package {package.module.removeprefix('hydra_plugins.')}, which is not installed",
                hint=package.hint,
            )


def has_gpu() -> bool:
    """Whether there may be a GPU; False only where there can be none. Asks torch only where it is imported."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if "torch" in sys.modules:
        return bool(sys.modules["torch"].cuda.is_available())
    if not sys.platform.startswith("linux"):
        return True
    return any(any(Path("/").glob(pattern.lstrip("/"))) for pattern in GPU_FILES)


def check_launcher(name: str, multirun: bool) -> None:
    """Raise ConfigError for a launcher that is not installed, or has no sweep to launch."""
    if name not in PLUGINS:
        return
    package = "hydra-joblib-launcher" if name == "joblib" else "'kvbench[launch]'"
    check_packages([Package(PLUGINS[name], "launcher", name, f"pip install {package}, or launcher=local")])
    if not multirun:
        raise ConfigError("launcher", name, "launches the jobs of a sweep, and this is one run", hint="add --multirun")


def check_here(checked: RunConfig, launcher: str = "local") -> None:
    """Refuse what the configuration alone tells cannot run on this machine.

    Raises:
        ConfigError: a package, a GPU or the folder of the data is missing.
    """
    for part in (checked.model, checked.method, checked.task, checked.logger):
        check_packages(getattr(part, "packages", tuple)())
    check_path(checked.dataset.get("path"))
    check_weights(checked)
    if launcher not in REMOTE:
        _check_device(checked)


def check_path(path: Any) -> None:
    """Raise ConfigError where ``dataset.path`` names nothing."""
    if not isinstance(path, str):
        return
    hint = "dataset.path=FILE_OR_FOLDER, or dataset.path=null for the hub's files"
    if not path.strip():
        raise ConfigError("dataset.path", "''", "must name a file or folder", hint=hint)
    if not exists(path, "dataset.path"):
        raise ConfigError("dataset.path", path, "does not exist: a file, a .zip, or a folder of files", hint=hint)
    if not Path(path).expanduser().is_file() and not Path(path).expanduser().is_dir():
        raise ConfigError("dataset.path", path, "is a device or a pipe, no file", hint=hint)


def exists(path: str, key: str) -> bool:
    """Whether there is something at `path`, where it can be looked up.

    Raises:
        ConfigError: the path is too long, a loop of links, of an unknown user's home, or out of reach.
    """
    try:
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, RuntimeError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(key, path, f"cannot be looked up ({said})", hint="another path") from error
    return True


def check_weights(checked: RunConfig) -> None:
    """Raise ConfigError for a folder without weights, where they are to be read."""
    folder = checked.model.folder()
    if folder is None or checked.model.weights == "random":
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            "model.path",
            checked.model.path,
            "has a config.json but no weights (*.safetensors)",
            hint="model.weights=random builds the architecture of that config.json with random weights",
        )


def _check_device(checked: RunConfig) -> None:
    runtime = checked.runtime
    if runtime.device.startswith("cuda") and not has_gpu():
        raise ConfigError(
            "runtime.device", runtime.device, "this machine shows no GPU", hint="runtime.device=auto, or cpu"
        )
    if runtime.device == "mps" and sys.platform != "darwin":
        raise ConfigError(
            "runtime.device", "mps", "is a device of Apple's machines", hint="runtime.device=auto, or cpu"
        )
    if runtime.device_map and not has_gpu():
        raise ConfigError(
            "runtime.device_map",
            runtime.device_map,
            "spreads a model over GPUs, and this machine shows none",
            hint="runtime.device_map=null",
        )
    if runtime.device_map and checked.model.weights != "random":
        hint = "pip install 'kvbench[multigpu]'"
        check_packages([Package("accelerate", "runtime.device_map", runtime.device_map, hint)])
    if runtime.kernels in ("cuda", "triton"):
        if runtime.device in ("cpu", "mps") or not has_gpu():
            raise ConfigError(
                "runtime.kernels",
                runtime.kernels,
                "is a kernel for a GPU, and the run would be without one",
                hint="runtime.kernels=auto",
            )
        module = "triton" if runtime.kernels == "triton" else "cuda.bindings"
        check_packages([Package(module, "runtime.kernels", runtime.kernels, "runtime.kernels=auto")])
