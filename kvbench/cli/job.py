"""One job of the main command line: its configuration is composed and run, and errors become its outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from kvbench.cli import settings
from kvbench.cli.compose import Composer, run_config
from kvbench.cli.model_choice import filled
from kvbench.errors import KvbenchError
from kvbench.util.confdir import conf_dir
from kvbench.util.progress import say

#: what a job ends with: ``status``, ``message``, ``metrics`` if there are any, ``exit_code`` after an error
Outcome = dict[str, Any]


def from_hydra(config: DictConfig, choices: Mapping[str, Any], texts: Sequence[str], extra: Path | None) -> Any:
    """Return the configuration of a single run, which Hydra has composed, as plain data.

    Args:
        config: the configuration as composed by Hydra.
        choices: the choice of each group.
        texts: the run's overrides.
        extra: folder given by ``--config-dir``; None if it is not given.

    Raises:
        ConfigError: a checkpoint's config.json cannot be read, or a value is missing.
    """
    return _with_preset(run_config(filled(config, choices.get("model"), texts, extra)), choices.get("method"))


def composed(texts: Sequence[str], extra: Path | None) -> dict[str, Any]:
    """Return the configuration of a job of a sweep as plain data.

    Args:
        texts: the job's overrides as typed, possibly with ``setting=``.
        extra: folder given by ``--config-dir``; None if it is not given.

    Raises:
        ConfigError: an override is wrong, a checkpoint's config.json cannot be read, or a value is missing.
    """
    expanded = settings.variants(texts, multirun=True)[0]
    composer = _composer(extra)
    inside = GlobalHydra.instance().is_initialized()  # in a job that Hydra has started
    with nullcontext() if inside else initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config, choices = composer.chosen(expanded)
        return _with_preset(run_config(config), choices.get("method"))


def _with_preset(plain: dict[str, Any], preset: str | None) -> dict[str, Any]:
    """Return a configuration with the name of the method's preset in ``method.preset``."""
    if preset and isinstance(plain.get("method"), dict):
        plain["method"] = {**plain["method"], "preset": preset}
    return plain


@cache
def _composer(extra: Path | None) -> Composer:
    return Composer(extra)


def run(compose: Callable[[], dict[str, Any]], *, row: bool, begun: Callable[[str], None] | None = None) -> Outcome:
    """Run one job and return its outcome; only an interruption raises an exception.

    Args:
        compose: function that returns the job's configuration.
        row: True to give a job that failed ``metrics`` without figures, for a row of the sweep's table.
        begun: function that is called with the id of the run before it starts.
    """
    began = time.time()
    plain: dict[str, Any] | None = None

    def act() -> dict[str, Any]:
        nonlocal plain
        plain = compose()
        from kvbench.runner.run import run as run_it

        return run_it(plain) if begun is None else run_it(plain, begun)

    return outcome_of(act, lambda: plain if row else None, began)


def outcome_of(act: Callable[[], Any], config: Callable[[], dict[str, Any] | None], began: float) -> Outcome:
    """Call a function that returns a run's metrics, and return the outcome; errors are printed and become its message.

    Args:
        act: the function.
        config: function that returns the configuration of a job that failed, for a row of the sweep's table; None
            for no row.
        began: time at which the job began.
    """
    import traceback

    try:
        metrics = act()
    except KvbenchError as error:
        say(f"error: {error}")
        return failed(config(), str(error), error.exit_code)
    except Exception as error:  # a bug in one method must not end a sweep
        traceback.print_exc()
        return failed(config(), f"{type(error).__name__}: {error}", 1)
    outcome: Outcome = {"status": metrics["status"], "message": metrics.get("error") or ""}
    if "rank" in metrics:  # not rank 0 of several processes
        return outcome
    outcome["metrics"] = metrics
    return outcome | {"before": _untouched(metrics, began)}


def failed(plain: dict[str, Any] | None, message: str, exit_code: int) -> Outcome:
    """Return the outcome of a job that failed.

    Args:
        plain: the job's configuration, for a row of the sweep's table; None for no row.
        message: text of the error.
        exit_code: exit status of a command that consists of this job.
    """
    outcome = {"status": "error", "message": message, "exit_code": exit_code}
    if plain is None:
        return outcome
    from kvbench.results.ranking import failed as failed_row

    return outcome | {"metrics": failed_row(plain, message)}


def _untouched(metrics: Mapping[str, Any], began: float) -> bool:
    """Return True if no sample of a run was stored after the time `began`."""
    try:
        return os.stat(Path(metrics["run_dir"]) / "samples.jsonl").st_mtime < began
    except (KeyError, OSError):
        return False
