"""The options of ``launcher=ray`` for Hydra, which knows those of other launchers from their plugins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class RayOptions:
    """Options of ``launcher=ray``, ``hydra.launcher.KEY``; conf/launcher/ray.yaml explains them."""

    _target_: str = "hydra_plugins.kvbench.RayLauncher"
    address: str | None = None
    n_jobs: int = -1
    cpus: float = 1.0
    gpus: Any = "auto"
    shared_folder: Any = "auto"
    retries: int = 3


def store() -> None:
    """Make the options known to Hydra as ``hydra/launcher=ray``."""
    ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayOptions, provider="kvbench")
