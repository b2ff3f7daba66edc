"""Launchers of sweeps: joblib, submitit and Ray behind Hydra's interface for launchers.

Hydra composes the options (``hydra.launcher``) and hands over the jobs. Each job holds the overrides of a unit of the
sweep (:mod:`kvbench.cli.plan`), so other processes receive units, and no objects of Hydra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from kvbench.cli import plan
from kvbench.cli.launchers.units import Unit, units_of
from kvbench.errors import KvbenchError
from kvbench.util.progress import say

#: name of this module for Hydra, which takes launchers from the name space of its plugins only
SPACE = "hydra_plugins.kvbench"


class _Pool(Launcher):
    """Base class of the launchers: takes the jobs from Hydra, and runs their units.

    The options are ``hydra.launcher`` without ``_target_``.
    """

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in options.items()
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember the configuration; called by Hydra."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; called by Hydra. Their outcomes are in the folder of the sweep."""
        hydra, parser = self.config.hydra, OverridesParser.create()
        sources = [Path(one.path) for one in hydra.runtime.config_sources if one.provider == "command-line"]
        chosen = [next(text for text in texts if text.startswith(f"+{plan.JOB}=")) for texts in job_overrides]
        values = [str(parser.parse_override(text).value()) for text in chosen]
        units = units_of(values, Path(str(hydra.sweep.dir)), next(iter(sources), None))
        try:
            self.run(units)
        except KvbenchError as error:  # Hydra would print it with advice of its own
            say(f"error: {error}")
            return []
        except OSError as error:  # the folder of the sweep cannot be written, for example
            say(f"error: {error.filename or self.config.hydra.sweep.dir}: {error.strerror or error}")
            return []
        done = JobReturn(status=JobStatus.COMPLETED)
        done.return_value = "ok"
        return [done for _ in values]

    def run(self, units: Sequence[Unit]) -> None:
        """Run units in other processes, and return once all have ended or were given up."""
        raise NotImplementedError


class JoblibLauncher(_Pool):
    """Launcher that runs a sweep in worker processes of this machine: ``launcher=joblib``."""

    def run(self, units: Sequence[Unit]) -> None:
        """See :func:`kvbench.cli.launchers.joblib_pool.run_with_joblib`."""
        from kvbench.cli.launchers import joblib_pool

        joblib_pool.run_with_joblib(units, self.options)


class SlurmLauncher(_Pool):
    """Launcher that runs a sweep as SLURM jobs: ``launcher=submitit``."""

    def run(self, units: Sequence[Unit]) -> None:
        """See :func:`kvbench.cli.launchers.submitit_pool.run_with_submitit`."""
        from kvbench.cli.launchers import submitit_pool

        submitit_pool.run_with_submitit(units, self.options, "slurm")


class SubmititLocalLauncher(_Pool):
    """Launcher that runs a sweep in processes that submitit starts on this machine: ``launcher=submitit_local``."""

    def run(self, units: Sequence[Unit]) -> None:
        """See :func:`kvbench.cli.launchers.submitit_pool.run_with_submitit`."""
        from kvbench.cli.launchers import submitit_pool

        submitit_pool.run_with_submitit(units, self.options, "local")


class RayLauncher(_Pool):
    """Launcher that runs a sweep as tasks of Ray, on a cluster or on this machine: ``launcher=ray``."""

    def run(self, units: Sequence[Unit]) -> None:
        """See :func:`kvbench.cli.launchers.ray_pool.run_with_ray`."""
        from kvbench.cli.launchers import ray_pool

        ray_pool.run_with_ray(units, self.options)


def register() -> None:
    """Make the launchers known to Hydra, under the names that conf/launcher/*.yaml use as ``_target_``."""
    sys.modules[SPACE] = sys.modules[__name__]
    for launcher in (JoblibLauncher, SlurmLauncher, SubmititLocalLauncher, RayLauncher):
        launcher.__module__ = SPACE
        Plugins.instance().register(launcher)
