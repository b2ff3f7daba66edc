"""A check of the number of jobs in a sweep, before the list of jobs is built."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep

from kvbench.cli.overrides import override_text
from kvbench.errors import ConfigError

#: maximum number of jobs in a sweep, and the environment variable that changes it
MAX_JOBS = 10_000
MAX_JOBS_NAME = "KVBENCH_MAX_JOBS"


def limit(name: str, default: int) -> int:
    """Return the limit that the user has set in the environment variable `name`; `default` if it is unset or empty.

    It must be a positive whole number, else ConfigError is raised.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not int(text):
        raise ConfigError(name, text, "must be a whole number, 1 or greater", hint=f"{name}={default}, or unset it")
    return int(text)


def check_sweeps(overrides: Sequence[Override], groups: Collection[str], settings: int = 1) -> None:
    """Raise ConfigError if an override of a sweep lists no values or a value twice, or if there are too many jobs.

    Other errors are an invalid ``range()`` or ``glob()``, a ``glob()`` for anything but a group, and any
    ``interval()``, which lists no values. `settings` is the number of settings after ``setting=``, each of which the
    sweep runs with all combinations.
    """
    most, jobs = limit(MAX_JOBS_NAME, MAX_JOBS), settings
    parts = [f"setting: {settings}"] if settings > 1 else []
    for override in overrides:
        if not override.is_sweep_override():
            continue
        count = _override_count(override, groups)
        if not count:
            raise ConfigError(
                f"{override.key_or_group}={override_text(override)}",
                None,
                "is an empty sweep: it matches no choice and contains no number",
                hint=f"list the values, separated by commas: {override.key_or_group}=a,b",
            )
        jobs *= count
        parts.append(f"{override.key_or_group}: {count}")
    if jobs > most:
        raise ConfigError(
            "--multirun",
            None,
            f"would start {jobs} jobs (number of values: {', '.join(parts)})",
            allowed=f"at most {most}",
            hint=f"list fewer values, or raise the limit: {MAX_JOBS_NAME}={jobs} python -m kvbench ...",
        )
    for override in overrides:
        _check_twice(override)


def _override_count(override: Override, groups: Collection[str]) -> int:
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    if isinstance(sweep, RangeSweep):
        start, stop, step = (float(number) for number in (sweep.start or 0, sweep.stop or 0, sweep.step))
        if not step or not all(map(math.isfinite, (start, stop, step))):
            raise ConfigError(
                f"{override.key_or_group}={override_text(override)}",
                None,
                "is not a valid range",
                hint="write range(START, STOP, STEP)",
            )
        return max(0, math.ceil((stop - start) / step))
    if isinstance(sweep, Glob):
        if override.key_or_group not in groups:
            shown = f"{override.key_or_group}={override_text(override)}"
            raise ConfigError(
                shown, None, "glob() matches only the choices of a group", hint="list the values, separated by commas"
            )
        return sum(1 for _ in override.sweep_string_iterator())
    assert isinstance(sweep, IntervalSweep)
    raise ConfigError(
        f"{override.key_or_group}={override_text(override)}",
        None,
        "is an interval, but a sweep needs separate values",
        hint=f"use a range with a step: {override.key_or_group}=range({sweep.start},{sweep.end},STEP)",
    )


def _check_twice(override: Override) -> None:
    """Raise ConfigError if a list contains a value twice, since a run would then appear in two rows."""
    sweep = override.value()
    if not isinstance(sweep, ChoiceSweep):
        return
    seen = set()
    for item in sweep.list:
        plain: Any = item.text if isinstance(item, QuotedString) else item
        mark = (isinstance(plain, bool), plain) if isinstance(plain, (bool, int, float, str)) else repr(plain)
        if mark in seen:
            key = override.key_or_group
            raise ConfigError(
                key, override_text(override), f"lists {plain} twice", hint=f"list each value once: {key}=..."
            )
        seen.add(mark)
