"""Processors and GPUs that a job of a sweep asks its launcher for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.cli.launchers.units import Unit


def needs(unit: Unit, cluster: Mapping[str, float], options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a task of Ray asks for: ``num_cpus`` and ``num_gpus``.

    Args:
        unit: the unit that the task runs.
        cluster: the resources of the cluster, as Ray names them.
        options: ``hydra.launcher``.
    """
    gpus = options["gpus"]
    if gpus == "auto":
        on_cpu = all("runtime.device=cpu" in texts for texts in unit.overrides)
        gpus = 0.0 if on_cpu or not cluster.get("GPU") else 1.0
    return {"num_cpus": options["cpus"], "num_gpus": gpus}
