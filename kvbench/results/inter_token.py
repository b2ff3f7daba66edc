"""Inter-token time as a linear function of length or bytes, fitted per batch size, and the break-even against fp16.

The time between two tokens is modelled as ``m * L + b`` with L tokens in the cache (at the middle of the answer). A
method with a smaller slope m and a larger intercept b than fp16 is faster beyond ``L* = (b - b_fp16) / (m_fp16 - m)``.

Over the bytes D of the cache the model is ``T = c0 + D / BW``, where BW is the bandwidth at which a step effectively
reads the cache and c0 everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.results.points import each

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


@dataclass(frozen=True)
class Line:
    """A straight line fitted to decode times: time per token as a function of the number of tokens in the cache.

    The slope is in seconds per cached token, the intercept in seconds; `lengths` is the number of different cache
    lengths in the fit.
    """

    slope: float
    intercept: float
    lengths: int


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """Fit a line by least squares to pairs of the number of tokens in the cache and the time per token in seconds.

    The result is None if there are fewer than two different lengths.
    """
    count = len({length for length, _ in points})
    if count < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return Line(slope, mean_y - slope * mean_x, count)


def break_even(line: Line, fp16: Line) -> float | None:
    """Return the cache length in tokens beyond which a method decodes faster than fp16.

    It is 0 if the method is faster at any length, and None if its slope is not smaller than fp16's.
    """
    if line.slope >= fp16.slope:
        return None
    return max(0.0, (line.intercept - fp16.intercept) / (fp16.slope - line.slope))


def fit_record(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fit the lines that `metrics.json` stores under ``inter_token``, by batch size (as text); only ``scores`` is read.

    Batch sizes with fewer than two prompt lengths are left out.
    """
    fits = {batch: fit(points) for batch, points in sorted(_length_points(metrics).items())}
    return {str(batch): _keys(line) for batch, line in fits.items() if line is not None}


def fit_lines(metrics: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Fit a line for each batch size, for the run and for fp16, with the length beyond which the run is faster.

    The figures are those of :func:`fit_record`. fp16's times are computed from the run's times and the ratios under
    ``vs_fp16``. If fp16 was measured at two or more of these lengths, there are also ``fp16_slope_s``,
    ``fp16_intercept_s`` and ``break_even`` (:func:`break_even`).
    """
    base = _length_points(metrics, fp16=True)
    fits: dict[int, dict[str, Any]] = {}
    for batch, points in sorted(_length_points(metrics).items()):
        line, fp16 = fit(points), fit(base.get(batch, []))
        if line is None:
            continue
        fits[batch] = _keys(line)
        if fp16 is not None:
            fits[batch] |= {"fp16_slope_s": fp16.slope, "fp16_intercept_s": fp16.intercept}
            fits[batch]["break_even"] = break_even(line, fp16)
    return fits


def _length_points(metrics: Mapping[str, Any], *, fp16: bool = False) -> dict[int, list[tuple[float, float]]]:
    """Return the (length, median TPOT) of a run's points by batch size, or fp16's at the same points."""
    points: dict[int, list[tuple[float, float]]] = {}
    for prompt, batch, figures in each(metrics):
        median = (figures.get("tpot_s") or {}).get("median")
        if figures["status"] != "ok" or not median:
            continue
        ratio = (figures.get("vs_fp16") or {}).get("tpot_s") if fp16 else 1.0
        if ratio:
            length = prompt + (figures.get("new_tokens") or 0) / 2
            points.setdefault(batch, []).append((length, median / ratio))
    return points


def _keys(line: Line) -> dict[str, Any]:
    return {"slope_s": line.slope, "intercept_s": line.intercept, "lengths": line.lengths}


def describe_fits(metrics: Mapping[str, Any]) -> list[str]:
    """Put the fitted lines of a run into words, one sentence per batch size, for the notes below a table.

    A sentence gives the slope, the intercept and, if fp16 was measured too, the break-even length.
    """
    texts = []
    for batch, figures in fit_lines(metrics).items():
        text = (
            f"inter-token time, batch {batch}: {1e3 * figures['intercept_s']:.3g} ms + {1e9 * figures['slope_s']:.3g}"
            f" ns per token of length (fit over {figures['lengths']} lengths)"
        )
        if "break_even" in figures:
            length = figures["break_even"]
            where = "at no length" if length is None else f"beyond {length:,.0f} tokens" if length else "at any length"
            text += f"; faster than fp16 {where}"
        texts.append(text)
    return texts
