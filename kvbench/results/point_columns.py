"""Columns of the tables of points (time and memory). To add one, add an entry to :data:`POINT_COLUMNS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvbench.results.columns import ROUND, Column, round_cell
from kvbench.results.record import Metrics
from kvbench.results.record_scores import Point
from kvbench.util.table import Cell, seconds, size


@dataclass(frozen=True)
class PointLine:
    """A line of a table with times and memory by prompt length in tokens and batch size (``dataset=efficiency``).

    Attributes:
        name: name of the run; empty if the line above has the same name.
        point: figures at this prompt length and batch size; None if the run has none at all.
        fit: line fitted to the inter-token time over length at this batch size, an entry of
            :func:`kvbench.results.inter_token.fit_lines`; None if the run has points of only one length.
    """

    name: str
    run: Metrics
    prompt: int = 0
    batch: int = 0
    point: Point | None = None
    fit: Mapping[str, Any] | None = None


def _figure(cell: Callable[[Point], Cell]) -> Callable[[PointLine], Cell]:
    """Return a function from lines to cells: `cell` for measured points, a dash for points that ran out of memory."""
    return lambda line: cell(line.point) if line.point is not None and line.point.status == "ok" else Cell("-")


def _value(read: Callable[[Point], Any]) -> Callable[[PointLine], Any]:
    return lambda line: None if line.point is None else read(line.point)


def _attribute_columns(*names: str) -> dict[str, Callable[[PointLine], Any]]:
    """Return CSV columns for attributes of a point: the heading is the attribute's name."""
    return {name: _value(attrgetter(name)) for name in names}


def _inner(group: str, names: Mapping[str, str]) -> dict[str, Callable[[PointLine], Any]]:
    """Return CSV columns for the keys of `group`, a nested attribute of a point; `names` maps headings to keys."""

    def reader(name: str) -> Callable[[Point], Any]:
        def read(point: Point) -> Any:
            inner = getattr(point, group)
            return inner.get(name) if isinstance(inner, Mapping) else getattr(inner, name, None)

        return read

    return {heading: _value(reader(name)) for heading, name in names.items()}


def _point_name(line: PointLine) -> Cell:
    return Cell(line.name, line.run.status if line.point is None else "")


def _point_ttft(line: PointLine) -> Cell:
    point = line.point
    if point is None:
        return Cell("-")
    if point.status != "ok":
        return Cell("oom", "" if point.bytes_asked is None else f"{size(point.bytes_asked)} more")
    search = f"search {seconds(point.search_s)}" if point.search_s else _roof(point, "ttft_s")
    return Cell(seconds(point.ttft_s), search)


def _roof(point: Point, name: str) -> str:
    predicted = (point.predicted or {}).get(name)
    return "" if predicted is None else f"roof {seconds(predicted)}"


def _point_gaps(point: Point) -> Cell:
    gaps = point.itl_s or {}
    return Cell(seconds(gaps.get("p90")), f"p99 {seconds(gaps['p99'])}" if "p99" in gaps else "")


def _point_read(point: Point) -> Cell:
    share = "" if point.read_share is None else f"{point.read_share:.0%} of the ceiling"
    return Cell(size(point.read_bytes), share)


def _point_tokens(point: Point) -> Cell:
    pair = (point.vs_fp16 or {}).get("tokens_per_s")
    return Cell(f"{point.tokens_per_s:.4g}", "" if pair is None else f"{pair:.2f}x fp16")


def _fitted(name: str) -> Callable[[PointLine], Any]:
    return lambda line: None if line.fit is None else line.fit.get(name)


def _point_line(line: PointLine) -> Cell:
    if line.fit is None:
        return Cell("-")
    slope = 1e9 * line.fit["slope_s"]
    text = f"{slope:.3g} ns" if abs(slope) < 1000 else f"{slope / 1000:.3g} µs"
    return Cell(text, f"from {seconds(line.fit['intercept_s'])}")


def _break_even(line: PointLine) -> Cell:
    if line.fit is None or "break_even" not in line.fit:
        return Cell("-")
    length = line.fit["break_even"]
    return Cell("never" if length is None else f"{length:,.0f}" if length else "any length")


def _line_speed_up(line: PointLine) -> float | None:
    """Return S, the same-work ratio: fp16's TPOT divided by the line's; None if fp16's is unknown."""
    ratio = None if line.point is None else (line.point.vs_fp16 or {}).get("tpot_s")
    return 1 / ratio if ratio else None


def _same_work(line: PointLine) -> Cell:
    ratio = _line_speed_up(line)
    return Cell("-" if ratio is None else f"{ratio:.2f}")


def _joules(line: PointLine) -> float | None:
    return None if line.point is None else (line.point.energy or {}).get("J_per_token")


def _point_energy(line: PointLine) -> Cell:
    joules = _joules(line)
    return Cell("-" if joules is None else f"{joules:.3g}")


def _has_energy(lines: Sequence[PointLine]) -> bool:
    return any(_joules(line) is not None for line in lines)


def _has_same_work(lines: Sequence[PointLine]) -> bool:
    return any(_line_speed_up(line) is not None for line in lines)


def _has_lines(lines: Sequence[PointLine]) -> bool:
    return any(line.fit is not None for line in lines)


def _has_rounds(lines: Sequence[PointLine]) -> bool:
    return any(line.point is not None and line.point.round_times is not None for line in lines)


def _has_break_even(lines: Sequence[PointLine]) -> bool:
    return any(line.fit is not None and "break_even" in line.fit for line in lines)


POINT_COLUMNS: list[Column[PointLine]] = [
    Column(
        "",
        cell=_point_name,
        csv={
            "run": lambda line: line.name,
            "run_id": lambda line: line.run.run_id,
            "model": lambda line: line.run.config.model,
            "device": lambda line: line.run.env.device_name,
        },
    ),
    Column(
        "prompt",
        "tokens",
        lambda line: Cell(str(line.prompt) if line.point else "-"),
        {"prompt": lambda line: line.prompt},
    ),
    Column(
        "batch",
        "sequences",
        lambda line: Cell(str(line.batch) if line.point else "-"),
        {"batch": lambda line: line.batch} | _attribute_columns("status"),
    ),
    Column("TTFT", "seconds", _point_ttft, _attribute_columns("ttft_s", "search_s", "prefill_s", "first_step_s")),
    Column(
        "TPOT",
        "seconds",
        _figure(lambda point: Cell(seconds(point.tpot_s.median if point.tpot_s else None), _roof(point, "tpot_s"))),
        _inner("tpot_s", {f"tpot_{name}_s": name for name in ("median", "mean", "p10", "p90", "p99")}),
    ),
    Column("p90", "seconds", _figure(_point_gaps), _inner("itl_s", {f"itl_{p}_s": p for p in ("p50", "p90", "p99")})),
    Column(
        "read",
        "bytes per step",
        _figure(_point_read),
        _attribute_columns("read_bytes", "GB_s", "read_share", "over_roof"),
    ),
    Column(
        "S",
        "fp16's TPOT divided by this one, at the same work",
        _same_work,
        {"S": _line_speed_up},
        present=_has_same_work,
    ),
    Column(
        "slope",
        "seconds per token of length; seconds at length 0; lengths",
        _point_line,
        {f"itl_{name}": _fitted(name) for name in ("slope_s", "intercept_s", "lengths")},
        present=_has_lines,
    ),
    Column(
        "break-even",
        "tokens",
        _break_even,
        {"break_even_tokens": _fitted("break_even")},
        present=_has_break_even,
    ),
    Column("tokens/s", "tokens per second", _figure(_point_tokens), _attribute_columns("tokens_per_s")),
    Column("peaks", "bytes", csv=_attribute_columns("peak_prefill", "peak_decode", "weights")),
    Column(
        "KV",
        "bytes",
        _figure(
            lambda point: Cell(size(point.kv_used), "" if point.kv_ratio is None else f"{point.kv_ratio:.2f}x less")
        ),
        _attribute_columns("kv_used", "kv_reserved", "kv_ratio", "kv_ratio_reserved"),
    ),
    Column(
        "compression",
        "ratio by the formats; by all memory beyond the weights",
        csv=_attribute_columns("r_nom", "r_alloc"),
    ),
    Column("J/token", "joules per token, whole board", _point_energy, {"J_per_token": _joules}, present=_has_energy),
    Column(
        "peak",
        "bytes; share of weights and KV",
        _figure(
            lambda point: Cell(
                size(point.peak_decode), "" if point.over_used is None else f"{point.over_used:.3f} of both"
            )
        ),
        _attribute_columns("over_used", "over_reserved", "capture_s"),
    ),
    Column(
        "steps",
        cell=_figure(lambda point: Cell(str(point.stepping).split(" (", 1)[0])),
        csv=_attribute_columns("stepping")
        | _inner("speculation", {n: n for n in ("rounds", "drafted", "accepted")})
        | _attribute_columns("forced", "path"),
    ),
    Column(
        "round",
        "seconds: draft, verification, sampling, flush",
        _figure(lambda point: round_cell(point.round_times)),
        _inner("round_times", {f"round_{name}": name for name in ROUND}),
        present=_has_rounds,
    ),
    Column(
        "predicted",
        "seconds and bytes",
        csv=_inner(
            "predicted",
            {f"predicted_{n}": n for n in ("ttft_s", "tpot_s", "expected_tpot_s", "peak_prefill", "peak_decode")},
        ),
    ),
    Column(
        "relative to fp16",
        "ratio",
        csv=_inner("vs_fp16", {f"{n}_vs_fp16": n for n in ("ttft_s", "tpot_s", "tokens_per_s", "peak_decode")}),
    ),
    Column("asked", "bytes", csv=_attribute_columns("bytes_asked")),
]
