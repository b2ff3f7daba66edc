"""The schema of the `logger` group: none, CSV or Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.util.requirements import Package, check_writable
from kvbench.util.schema import build


@dataclass(frozen=True, kw_only=True)
class NoLogger:
    """Settings of ``logger=none``: results are only written to ``runtime.results_dir``."""

    name: Literal["none"]


@dataclass(frozen=True, kw_only=True)
class CsvLogger:
    """Settings of the logger ``csv``, which writes one row per run to a CSV file.

    Args:
        path: the CSV file.
    """

    name: Literal["csv"]
    path: str = "results/runs.csv"

    def check(self) -> None:
        """Raise ConfigError if the file cannot be written, or if it exists but is not a log of kvbench."""
        if not self.path.strip():
            raise ConfigError("logger.path", "''", "must name a file", hint="logger.path=results/runs.csv")
        check_writable(self.path, "logger.path", file=True)
        if Path(self.path).is_file():
            with open(self.path, "rb") as handle:
                head = handle.read(100_000)
            if head.strip() and b"run_id" not in head.splitlines()[0].split(b","):
                raise ConfigError(
                    "logger.path",
                    self.path,
                    "is not a kvbench log, because its first line has no column run_id; kvbench would "
                    "overwrite the file",
                    hint="logger.path=results/runs.csv",
                )


@dataclass(frozen=True, kw_only=True)
class WandbLogger:
    """Settings of the logger ``wandb``, which sends results to Weights & Biases.

    Args:
        project, entity, group, tags: passed to ``wandb.init``.
        mode: ``online``, ``offline`` or ``disabled``, as in wandb; ``auto`` is online if an API key is configured and
            offline otherwise.
        dir: folder in which wandb creates its own folder.
    """

    name: Literal["wandb"]
    project: str = "kvbench"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    dir: str = "results"

    def packages(self) -> tuple[Package, ...]:
        """Return the Python packages that must be installed for this logger: wandb."""
        return (Package("wandb", "logger", "wandb", "run pip install wandb, or set logger=csv"),)

    def check(self) -> None:
        """Raise ConfigError if the folder cannot be written, or the project's name is empty."""
        if not self.project:
            raise ConfigError("logger.project", "''", "must not be empty", hint="logger.project=kvbench")
        check_writable(self.dir, "logger.dir")


AnyLogger = NoLogger | CsvLogger | WandbLogger
LOGGERS: dict[str, type[AnyLogger]] = {"none": NoLogger, "csv": CsvLogger, "wandb": WandbLogger}


def logger_of(group: Mapping[str, Any]) -> AnyLogger:
    """Check the configuration group ``logger``, and return the settings of the chosen logger.

    Raises:
        ConfigError: the logger is unknown, has a wrong key or value, or cannot write its file or folder.
    """
    name = group.get("name")
    if name not in LOGGERS:
        raise ConfigError("logger.name", name, "is not a known logger", allowed=LOGGERS)
    logger: AnyLogger = build(LOGGERS[name], group, "logger")
    if not isinstance(logger, NoLogger):
        logger.check()
    return logger
