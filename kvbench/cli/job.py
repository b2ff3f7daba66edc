"""One job of the main command line: its configuration is composed and run, and errors become its outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.cli import settings
from kvbench.cli.compose import Composer
from kvbench.config.run_config import RunConfig
from kvbench.errors import KvbenchError
from kvbench.util.progress import say

#: what a job ends with: ``status``, ``message``, ``metrics`` if there are any, ``exit_code`` after an error
Outcome = dict[str, Any]


def configuration(texts: Sequence[str], extra: Path | None) -> RunConfig:
    """Return the checked configuration of a job from its overrides as typed, possibly with ``setting=``.

    Raises:
        ConfigError: an override is wrong, a checkpoint's config.json cannot be read, or a value is missing or wrong.
    """
    return composer_of(extra).configuration(settings.variants(texts, multirun=True)[0])


def composed(texts: Sequence[str], extra: Path | None) -> dict[str, Any]:
    """Return the configuration of a job as plain data, unchecked; arguments are those of :func:`configuration`."""
    return composer_of(extra).plain(settings.variants(texts, multirun=True)[0])


@cache
def composer_of(extra: Path | None) -> Composer:
    """Return the composer for a folder of ``--config-dir``, the same one at every call in this process."""
    return Composer(extra)


def outcome_of_job(
    configure: Callable[[], RunConfig],
    *,
    row: Callable[[], dict[str, Any]] | None = None,
    begun: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one job and return its outcome; only an interruption raises an exception.

    `row` is called if the job fails. It returns the job's configuration as unchecked plain data, from which the outcome
    gets ``metrics`` without figures for the sweep's table. If `row` is None, the outcome then has no ``metrics``.
    `begun` is called with the id of the run before the run starts.
    """

    def act() -> dict[str, Any]:
        checked = configure()
        from kvbench.runner.run import answer_run

        return answer_run(checked) if begun is None else answer_run(checked, begun)

    def plain() -> dict[str, Any] | None:
        try:
            return row() if row is not None else None
        except Exception:  # what is wrong with it is the job's error already
            return None

    return outcome_of(act, plain, time.time())


def outcome_of(act: Callable[[], Any], config: Callable[[], dict[str, Any] | None], began: float) -> Outcome:
    """Call a function that returns a run's metrics, and return the outcome; errors are printed and become its message.

    `config` is called if `act` fails. It returns the configuration for a row of the sweep's table, or None for no row.
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
    """Return the outcome of a job that failed, with a row for the sweep's table if its configuration is not None.

    `exit_code` is the exit status of a command that consists of this job.
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
