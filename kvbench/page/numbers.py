"""Conversion of numbers, texts and distributions to short values for the JSON of the report page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.results.aggregate import percentile
from kvbench.results.samples import MEASURED, Row

#: significant digits of numbers in the page
DIGITS = 5
#: longest name, command or message in characters
LONGEST = 600


def short_number(value: Any, digits: int = DIGITS) -> float | int | None:
    """Return a number with `digits` significant digits; None for None, NaN, infinities and other types."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def shorten_middle(text: Any, longest: int = LONGEST) -> str:
    """Return a text, shortened in its middle to at most `longest` characters."""
    whole = str(text)
    if len(whole) <= longest:
        return whole
    half = (longest - 5) // 2
    return f"{whole[:half]} ... {whole[-half:]}"


def whole_or_empty(text: str, longest: int) -> str:
    """Return a text that must not be shortened, such as a command; empty if it is longer than `longest`."""
    return text if len(text) <= longest else ""


def json_value(value: Any, longest: int = 160) -> Any:
    """Return the value of a setting as JSON data: numbers that JSON lacks, and long or nested values, become texts."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        try:
            return shorten_middle(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str), longest)
        except (ValueError, TypeError, RecursionError):
            return shorten_middle(repr(value), longest)
    return shorten_middle(value, longest)


def trimmed(values: Sequence[Any]) -> list[Any]:
    """Return a list without the Nones at its end: ``[1, None, 2, None]`` becomes ``[1, None, 2]``."""
    known = list(values)
    while known and known[-1] is None:
        known.pop()
    return known


def encoded(data: Any) -> str:
    """Return data as JSON that may be part of an HTML page.

    Characters that HTML or JavaScript could take for markup are written as escapes, so that no text of a run can end
    the element that holds the data. Lone surrogates become escapes too.

    Raises:
        ValueError: a number is NaN or infinite (:func:`short_number` and :func:`json_value` never return one).
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


#: the percentiles of a distribution
PERCENTILES = (5, 25, 50, 75, 95)


def spread(rows: Iterable[Row], device: str | None) -> tuple[list[Any], list[Any]]:
    """Return the distributions of TTFT over samples and of the time per token over decode steps.

    Times of other devices than `device` are left out; None includes all devices. Warm-up samples and each sample's
    first decode step are left out too, as in the medians of `metrics.json`. A distribution is a list of the
    :data:`PERCENTILES` in seconds and the number of values; it is empty without values.
    """
    first: list[float] = []
    later: list[float] = []
    for row in rows:
        timing = row.get(MEASURED) or {}
        if timing.get("warm_up") or (device is not None and timing.get("device") != device):
            continue
        start = short_number(timing.get("ttft_s"))
        if start is not None:
            first.append(start)
        steps = [short_number(step) for step in (timing.get("step_s") or ())[1:]]
        later += [step for step in steps if step is not None]
    return _percentiles(first), _percentiles(later)


def _percentiles(values: Sequence[float]) -> list[Any]:
    if not values:
        return []
    ordered = sorted(values)
    return [*(short_number(percentile(ordered, q)) for q in PERCENTILES), len(values)]
