"""Checks of what a configuration requires (packages, a GPU, files), without importing torch.

They run before a run touches its data or model, and before the command line starts the first job of a sweep. If a
launcher sends jobs to other machines (submitit, ray), the GPU is checked there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import ConfigError
from kvbench.models.endpoint_config import EndpointModel
from kvbench.util.requirements import Package, check_packages, exists, has_gpu

if TYPE_CHECKING:
    from kvbench.config.run_config import RunConfig

#: launchers that need a package: its module, and what to install; and launchers whose jobs run on other machines
PLUGINS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "hydra-joblib-launcher"),
    "submitit": ("hydra_plugins.hydra_submitit_launcher", "'kvbench[launch]'"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "'kvbench[launch]'"),
    "ray": ("ray", "'kvbench[ray]'"),
}
REMOTE = ("submitit", "ray")


def check_launcher(name: str, multirun: bool) -> None:
    """Raise ConfigError if the plugin of ``launcher=`` is not installed, or if the launcher needs ``--multirun``.

    The launcher ``local`` has no requirements.
    """
    if name not in PLUGINS:
        return
    module, package = PLUGINS[name]
    check_packages([Package(module, "launcher", name, f"run pip install {package}, or set launcher=local")])
    if not multirun:
        raise ConfigError(
            "launcher", name, "launches the jobs of a sweep, but this command is a single run", hint="add --multirun"
        )


def check_here(checked: RunConfig, launcher: str = "local") -> None:
    """Check that this machine has the packages, the device and the files that a run needs.

    The device is not checked if the launcher sends jobs to other machines.

    Raises:
        ConfigError: a package, a GPU, the weights or the data are missing.
    """
    for part in (checked.model, checked.method, checked.logger):
        check_packages(getattr(part, "packages", tuple)())
    check_packages(checked.task.packages())
    check_path(checked.dataset.get("path"))
    check_weights(checked)
    if launcher not in REMOTE:
        _check_device(checked)


def check_path(path: Any) -> None:
    """Raise ConfigError if ``dataset.path`` is set (not None), but is not an existing file or folder."""
    if not isinstance(path, str):
        return
    hint = "set dataset.path=FILE_OR_FOLDER, or dataset.path=null to use the files of the Hugging Face hub"
    if not path.strip():
        raise ConfigError("dataset.path", "''", "must name a file or folder", hint=hint)
    if not exists(path, "dataset.path"):
        raise ConfigError(
            "dataset.path", path, "does not exist; expected a file, a .zip archive, or a folder of files", hint=hint
        )
    if not Path(path).expanduser().is_file() and not Path(path).expanduser().is_dir():
        raise ConfigError("dataset.path", path, "is a device or a pipe, not a file or folder", hint=hint)


def check_weights(checked: RunConfig) -> None:
    """Raise ConfigError if a local folder, or the file that a server is to load, has no weights."""
    if isinstance(checked.model, EndpointModel):
        checked.model.check_file()
        return
    folder = checked.model.folder()
    if folder is None or checked.model.random:
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            "model.path",
            checked.model.path,
            "has a config.json but no weights (*.safetensors)",
            hint=(
                "add the weights, or set model.weights=random to fill that config.json's architecture "
                "with random weights"
            ),
        )


def _check_device(checked: RunConfig) -> None:
    runtime = checked.runtime
    if runtime.device.startswith("cuda") and not has_gpu():
        raise ConfigError(
            "runtime.device",
            runtime.device,
            "no GPU is visible on this machine",
            hint="set runtime.device=auto or runtime.device=cpu",
        )
    if runtime.device == "mps" and sys.platform != "darwin":
        raise ConfigError(
            "runtime.device",
            "mps",
            "exists only on Apple machines",
            hint="set runtime.device=auto or runtime.device=cpu",
        )
    if runtime.device_map and not has_gpu():
        raise ConfigError(
            "runtime.device_map",
            runtime.device_map,
            "spreads a model over GPUs, but no GPU is visible on this machine",
            hint="runtime.device_map=null",
        )
    if runtime.device_map and not checked.model.random:
        hint = "pip install 'kvbench[multigpu]'"
        check_packages([Package("accelerate", "runtime.device_map", runtime.device_map, hint)])
    if runtime.kernels == "cpu" and (runtime.device not in ("auto", "cpu") or (runtime.device == "auto" and has_gpu())):
        raise ConfigError(
            "runtime.kernels",
            runtime.kernels,
            "needs a CPU, but this run would use a GPU",
            hint="runtime.kernels=auto, or runtime.device=cpu",
        )
    if runtime.kernels in ("cuda", "triton"):
        if runtime.device in ("cpu", "mps") or not has_gpu():
            raise ConfigError(
                "runtime.kernels",
                runtime.kernels,
                "needs a GPU, but this run would not use one",
                hint="runtime.kernels=auto",
            )
        module = "triton" if runtime.kernels == "triton" else "cuda.bindings"
        check_packages([Package(module, "runtime.kernels", runtime.kernels, "runtime.kernels=auto")])
