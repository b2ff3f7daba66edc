"""Loggers, which copy runs to a CSV file or Weights & Biases. If one fails, nothing is lost from `results/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.loggers.base import Logger, Safe


def load(logger: Any, run_id: str, config: Mapping[str, Any], label: str, say: Callable[[str], None]) -> Logger:
    """Return the configured logger, wrapped so that its failures are reported and otherwise ignored.

    Args:
        logger: the checked settings of the logger (:mod:`kvbench.config.logger_config`).
        run_id: id of the run, also used as its id in W&B.
        config: the resolved configuration.
        label: display name of the method and quantizer.
        say: function that shows a line to the user.
    """
    if logger.name == "csv":
        from kvbench.loggers.csv import CsvLogger

        return Safe(CsvLogger(logger.path), logger.name, say)
    if logger.name == "wandb":
        from kvbench.loggers.wandb import WandbLogger

        return Safe(WandbLogger(logger, run_id, config, label, say), logger.name, say)
    return Logger()
