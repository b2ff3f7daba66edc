"""Processors and GPUs that a job of a sweep asks its launcher for, by the memory that its run is expected to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.cli import job
from kvbench.cli.launchers.units import Unit
from kvbench.config.run_config import RunConfig
from kvbench.errors import KvbenchError
from kvbench.runner import gate

#: shares of a GPU are multiples of 1 / PARTS, so that Ray can add them up exactly
PARTS = 20
#: part of a GPU's memory that is given away; the rest is for fragmentation and for what predictions leave out
USABLE = 0.92


def needs(unit: Unit, has_gpus: bool, memory: Callable[[], int | None], options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a task of Ray asks for to run a unit: ``num_cpus`` and ``num_gpus``.

    `memory` returns the bytes of one of the cluster's GPUs, None if unknown; the options are ``hydra.launcher``.
    """
    configs = [_checked(texts, unit) for texts in unit.overrides]
    workers = max((_workers(config) for config in configs if config is not None), default=1)
    gpus = options["gpus"]
    if gpus == "auto":
        gpus = _gpus(configs, memory) if has_gpus else 0.0
    on_gpu = gpus > 0
    return {
        "num_cpus": float(options["cpus"]) * (1 if on_gpu else workers),
        "num_gpus": gpus * workers if on_gpu and workers > 1 else gpus,
    }


def fits(needs: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> bool:
    """Return True if at least one machine has the ``CPU`` and ``GPU`` that a task asks for (:func:`needs`)."""
    return any(
        needs["num_cpus"] <= machine.get("CPU", 0) and needs["num_gpus"] <= machine.get("GPU", 0)
        for machine in machines
    )


def _checked(texts: list[str], unit: Unit) -> RunConfig | None:
    """Return the configuration of a job; None if it is invalid, which the job itself reports."""
    try:
        return job.configuration(texts, unit.extra)
    except KvbenchError:
        return None


def _workers(config: RunConfig) -> int:
    return config.runtime.workers if isinstance(config.runtime.workers, int) else 1


def _gpus(configs: list[RunConfig | None], memory: Callable[[], int | None]) -> float:
    """Return the share of a GPU that holds the runs of a unit; 1 if they need it alone, 0 if they run on the CPU.

    A run that measures times, or shares its GPU's prefill with other runs, gets a whole GPU.
    """
    known = [config for config in configs if config is not None]
    if known and all(config.runtime.device in ("cpu", "mps") for config in known):
        return 0.0
    if len(known) != 1 or known[0].task.times_only or known[0].task.single_process or _workers(known[0]) > 1:
        return 1.0
    predicted = gate.peak_bytes(known[0])
    total = memory() if predicted is not None else None
    if predicted is None or not total:
        return 1.0
    return min(1.0, math.ceil(predicted / (USABLE * total) * PARTS) / PARTS)
