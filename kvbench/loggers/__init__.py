"""Loggers, which copy runs to a CSV file or Weights & Biases. If one fails, nothing is lost from `results/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kvbench.loggers.base import Logger, Safe
from kvbench.results import mirror

#: id of the sweep whose jobs run now; None outside of sweeps
_SWEEP: ContextVar[str | None] = ContextVar("sweep", default=None)


@contextmanager
def in_sweep(name: str) -> Iterator[None]:
    """Tell the loggers of runs inside a ``with`` block that the runs belong to the sweep with the id `name`."""
    token = _SWEEP.set(name)
    try:
        yield
    finally:
        _SWEEP.reset(token)


def load_logger(
    logger: Any,
    run_id: str,
    config: Mapping[str, Any],
    label: str,
    say: Callable[[str], None],
    folder: Path | None = None,
) -> Logger:
    """Return the logger that the configuration has chosen; if it fails later, the run continues.

    Failures are reported through `say` and otherwise ignored. A job whose results another machine gathers
    (:mod:`kvbench.results.mirror`) logs nothing; the gathering machine does.

    Args:
        logger: the checked settings of the logger (:mod:`kvbench.config.logger_config`).
        run_id: id of the run, also used as its id in Weights & Biases.
        label: name of the method and quantizer, for display.
        folder: folder of the run, whose files some loggers send; None to send none.
    """
    if mirror.current() is not None:
        return Logger()
    if logger.name == "csv":
        from kvbench.loggers.csv import CsvLogger

        return Safe(CsvLogger(logger.path), logger.name, say)
    if logger.name == "wandb":
        from kvbench.loggers.wandb import WandbLogger

        return Safe(WandbLogger(logger, run_id, config, label, say, folder, _SWEEP.get()), logger.name, say)
    return Logger()
