"""Points measured by several processes: median of their medians, spread, and the lines and break-evens that follow.

Each process writes a JSON file of ``kvbench.bench tpot`` with the same points (:func:`load_replicates`).
:func:`fold_replicates` returns, for each point, the figures of the median over processes, and for each setting and
batch size the lines fitted to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.errors import DataError
from kvbench.results.inter_token import LatencyFit, crossing, fit_latency
from kvbench.results.points import allocated_compression, cache_bound, nominal_compression, same_work_ratio

Row = dict[str, Any]
#: coefficient of variation over processes above which a point counts as unstable
UNSTABLE = 0.03
#: what processes must have in common
COMMON = ("device", "model", "weights", "dtype", "arithmetic", "memory_limit_gb")


def load_replicates(paths: Sequence[Path]) -> list[Row]:
    """Read the files of several processes and return their contents.

    Raises:
        DataError: a file cannot be read, is named twice, is not one of ``kvbench.bench tpot``, or its model, its device
            or its use of torch.compile differs from the first file's.
    """
    contents: list[Row] = []
    compiled: list[Any] = []
    for number, path in enumerate(paths):
        if path.resolve() in (other.resolve() for other in paths[:number]):
            raise DataError(f"{path} is named twice\n  hint: name each process's file once")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}\n  hint: measure it again") from None
        if not isinstance(content, dict) or "rows" not in content or "model" not in content:
            raise DataError(f"{path} does not contain points of time and memory\n  hint: name files of bench tpot")
        _check_points(path, content["rows"])
        contents.append(content)
        compiled += sorted({bool(row.get("compile")) for row in content["rows"]})
        if len(set(compiled)) > 1:
            raise DataError(
                f"{path}: some points were measured with --compile and others without it, in it or in {paths[0]}\n"
                "  hint: fold only processes that measured the same work"
            )
        for key in COMMON:
            # earlier versions, which record no arithmetic, computed in what they stored
            mine, first = (
                one.get(key, one.get("dtype") if key == "arithmetic" else None) for one in (content, contents[0])
            )
            if mine != first:
                raise DataError(
                    f"{path}: {key} is {mine}, but {first} in {paths[0]}\n"
                    "  hint: fold only processes that measured the same model on the same device"
                )
    return contents


def _check_points(path: Path, rows: Any) -> None:
    """Raise DataError if rows are not points of time and memory whose times are numbers above 0."""
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} has no points\n  hint: measure it again with bench tpot")
    for number, row in enumerate(rows):
        try:
            if row["status"] not in ("ok", "oom"):
                continue
            _ = [row[key] for key in ("setting", "batch", "prompt", "new_tokens")]
            if row["status"] == "ok":
                seconds = row["tpot_s"]["median"]
                if not (math.isfinite(seconds) and seconds > 0):
                    raise ValueError(f"tpot_s.median is {seconds}, not a number above 0")
                _ = row["kv_used"]["total"]
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise DataError(f"{path}: rows[{number}]: {reason}\n  hint: measure it again with bench tpot") from None


def fold_replicates(contents: Sequence[Mapping[str, Any]]) -> Row:
    """Fold the points of several processes into ``points`` and ``fits`` (:func:`_folded_point`, :func:`_fits`)."""
    groups: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for number, content in enumerate(contents):
        for row in content["rows"]:
            if row["status"] in ("ok", "oom"):
                key = (row["setting"], row.get("graphs"), row["batch"], row["prompt"], row["new_tokens"])
                groups.setdefault(key, []).append((number, row))
    full_bits = 32.0 if contents and contents[0].get("dtype") == "float32" else 16.0
    points = [_folded_point(rows, full_bits) for _, rows in sorted(groups.items(), key=lambda item: _order(item[0]))]
    fits = list(_fits(points))
    _add_ratios(points, fits)
    return {"processes": len(contents), "points": points, "fits": fits}


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a sort key: fp16 first, then by setting, kind of steps, batch size and length."""
    return (key[0] != "fp16", key[0], str(key[1]), *key[2:])


def _folded_point(numbered: Sequence[tuple[int, Mapping[str, Any]]], full_bits: float) -> Row:
    """Return the figures of one point over all processes, from pairs of a process's number and its row of the point.

    ``medians_s`` are the median times of the processes, ``tpot_s`` is their median and ``cv`` their :func:`variation`;
    ``unstable`` is True if ``cv`` exceeds :data:`UNSTABLE`. ``measured_by`` are the numbers of the processes. Sizes are
    taken from the first process, because they are the same in all.
    """
    rows = [row for _, row in numbered]
    one = rows[0]
    point: Row = {key: one.get(key) for key in ("setting", "graphs", "prompt", "batch", "new_tokens")}
    timed = [row for row in rows if row["status"] == "ok"]
    if len(timed) < len(rows):
        asked = next(row.get("bytes_asked") for row in rows if row["status"] != "ok")
        return point | {"status": "oom", "bytes_asked": asked}
    medians = [row["tpot_s"]["median"] for row in timed]
    time_s = median(medians)
    cv = variation(medians)
    bits = one.get("nominal_bits")
    point |= {
        "status": "ok",
        "stepping": one.get("stepping"),
        "path": one.get("path"),
        "tpot_s": time_s,
        "medians_s": medians,
        "measured_by": [number for number, _ in numbered],
        "steps": one["tpot_s"].get("n"),
        "cv": cv,
        "unstable": cv is not None and cv > UNSTABLE,
        "weights": one.get("weights"),
        "kv_used": one["kv_used"]["total"],
        "kv_reserved": (one.get("kv_reserved") or {}).get("total"),
        "kv_full": round(one["kv_fp16"] * full_bits / 16) if "kv_fp16" in one else None,
        "peak_decode": (one.get("peak") or {}).get("decode"),
        "read_bytes": one.get("read_bytes"),
        "r_nom": nominal_compression(bits["key"], bits["value"], full_bits) if bits else None,
        "r_alloc": None,
        "ceiling_GB_s": (one.get("ceiling") or {}).get("GB_s"),
    }
    if point["kv_full"] and point["peak_decode"]:
        point["r_alloc"] = allocated_compression(point["kv_full"], point["peak_decode"], point["weights"])
    if point["read_bytes"]:
        point["GB_s"] = point["read_bytes"] / time_s / 1e9
        point["read_share"] = point["GB_s"] / point["ceiling_GB_s"] if point["ceiling_GB_s"] else None
    return point


def variation(samples: Sequence[float]) -> float | None:
    """Return the standard deviation (n - 1) of samples divided by their mean; None for fewer than two."""
    if len(samples) < 2:
        return None
    mean = sum(samples) / len(samples)
    return math.sqrt(sum((x - mean) ** 2 for x in samples) / (len(samples) - 1)) / mean


def length(point: Mapping[str, Any]) -> float:
    """Return the number of cached tokens in the middle of a point's decoding, to which its time per token applies."""
    return float(point["prompt"] + point["new_tokens"] / 2)


def _fits(points: Sequence[Row]) -> Iterator[Row]:
    """Yield the lines of each setting and batch size, over length and over bytes, and the break-even with fp16."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for point in points:
        if point["status"] == "ok":
            groups.setdefault((point["setting"], point["graphs"], point["batch"]), []).append(point)
    lines: dict[tuple[Any, ...], LatencyFit] = {}
    for key, group in groups.items():
        # the same processes for all settings, so that each can have a break-even length of its own
        alike = [point for other, its in groups.items() if other[1:] == key[1:] for point in its]
        common = sorted(set.intersection(*(set(point["measured_by"]) for point in alike)))
        by_length = _fit(group, common, length)
        by_bytes = _fit(group, common, lambda point: float(point["kv_used"]))
        if by_length is None or by_bytes is None:
            continue
        lines[key] = by_length
        row: Row = dict(zip(("setting", "graphs", "batch"), key, strict=True))
        row |= {
            "lengths": by_length.line.lengths,
            "slope_s": by_length.line.slope,
            "intercept_s": by_length.line.intercept,
            "r2": by_length.r2,
            "slopes_s": list(by_length.slopes),
            "intercepts_s": list(by_length.intercepts),
            # bytes that do not grow, as of a method that drops tokens, are read at no bandwidth
            "BW_eff_GB_s": 1e-9 / by_bytes.line.slope if by_bytes.line.slope > 0 else None,
            "c0_s": by_bytes.line.intercept,
        }
        fp16 = lines.get(("fp16", *key[1:]))
        if fp16 is not None and key[0] != "fp16":
            row |= _break_even(by_length, fp16)
        yield row


def _fit(group: Sequence[Row], common: Sequence[int], x: Callable[[Row], float]) -> LatencyFit | None:
    """Fit a line to the points of a setting, and one for each process that measured all points.

    `common` are the numbers of the processes that measured all points of all settings; `x` returns a point's abscissa.
    """
    own = [dict(zip(point["measured_by"], point["medians_s"], strict=True)) for point in group]
    processes = [[(x(point), times[n]) for point, times in zip(group, own, strict=True)] for n in common]
    return fit_latency([(x(point), point["tpot_s"]) for point in group], processes if len(common) > 1 else ())


def _break_even(own: LatencyFit, fp16: LatencyFit) -> Row:
    """Return the break-even length, the reason if there is none, and the break-even length of each process."""
    result = crossing(own.line, fp16.line)
    row: Row = {"break_even": result.length, "no_break_even": result.reason, "break_evens": []}
    for own_slope, own_intercept, slope, intercept in zip(
        own.slopes, own.intercepts, fp16.slopes, fp16.intercepts, strict=False
    ):
        line, base = type(own.line)(own_slope, own_intercept, 2), type(own.line)(slope, intercept, 2)
        row["break_evens"].append(crossing(line, base).length)
    return row


def _add_ratios(points: Sequence[Row], fits: Sequence[Row]) -> None:
    """Add S and S_cache to the points at which fp16 was measured too."""
    base = {
        (p["graphs"], p["batch"], p["prompt"], p["new_tokens"]): p
        for p in points
        if p["setting"] == "fp16" and p["status"] == "ok"
    }
    rates = {(row["graphs"], row["batch"]): row["BW_eff_GB_s"] for row in fits if row["setting"] == "fp16"}
    for point in points:
        fp16 = base.get((point["graphs"], point["batch"], point["prompt"], point["new_tokens"]))
        if point["status"] != "ok" or fp16 is None:
            continue
        point["S"] = same_work_ratio(fp16["tpot_s"], point["tpot_s"])
        rate, peak = rates.get((point["graphs"], point["batch"])), point["ceiling_GB_s"]
        if rate and peak:
            sizes = fp16["kv_used"], point["kv_used"]
            point["S_cache"] = cache_bound(fp16["tpot_s"], sizes[0], 1e9 * rate, sizes[1], 1e9 * peak)
