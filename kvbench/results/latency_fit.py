"""Decode time as a straight line over the length or the bytes of the cache, and the break-even length with fp16.

Over the length, the model is that of :mod:`kvbench.results.inter_token`. Over the bytes D of the cache it is
``T = c0 + D / BW``, where BW is the bandwidth at which a step effectively reads the cache and c0 everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.results.inter_token import Line, break_even, fit

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LatencyFit:
    """A straight line fitted to decode times by least squares.

    Args:
        r2: coefficient of determination: the share of the variance of the times that the line explains.
        slopes, intercepts: the same line fitted to each process alone; empty for a single process.
    """

    line: Line
    r2: float
    slopes: tuple[float, ...] = ()
    intercepts: tuple[float, ...] = ()


@dataclass(frozen=True)
class BreakEven:
    """The length beyond which a method decodes faster than fp16.

    `length` counts tokens in the cache; 0 if the method is faster at any length; None if no such length exists, for
    which `reason` says why.
    """

    length: float | None
    reason: str | None = None


def fit_latency(points: Points, processes: Sequence[Points] = ()) -> LatencyFit | None:
    """Fit a line to pairs of length (or bytes) and seconds, such as medians over processes.

    `processes` are the pairs of each process. The result is None if there are fewer than two different lengths.
    """
    line = fit(points)
    if line is None:
        return None
    lines = [own for own in map(fit, processes) if own is not None]
    slopes, intercepts = tuple(own.slope for own in lines), tuple(own.intercept for own in lines)
    return LatencyFit(line, r_squared(points, line), slopes, intercepts)


def r_squared(points: Points, line: Line) -> float:
    """Return the share of the variance of the times that a line explains; 1 if all times are equal."""
    mean = sum(y for _, y in points) / len(points)
    total = sum((y - mean) ** 2 for _, y in points)
    rest = sum((y - line.slope * x - line.intercept) ** 2 for x, y in points)
    return 1 - rest / total if total else 1.0


def crossing(method: Line, fp16: Line) -> BreakEven:
    """Return the break-even length ``(b_q - b_f) / (m_f - m_q)`` of a method with fp16.

    The method's line has the slope ``m_q`` and the intercept ``b_q``, that of fp16 ``m_f`` and ``b_f``.
    """
    length = break_even(method, fp16)
    if length is not None:
        return BreakEven(length)
    slopes = f"a cached token costs {1e9 * method.slope:.3g} ns, not less than the {1e9 * fp16.slope:.3g} ns of fp16"
    if method.slope > fp16.slope and method.intercept < fp16.intercept:
        below = (fp16.intercept - method.intercept) / (method.slope - fp16.slope)
        return BreakEven(None, f"{slopes}; faster only below {below:,.0f} tokens")
    return BreakEven(None, slopes)
