"""Tables of points: the columns of each command, taken from a point's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvbench.bench.choices import short_count
from kvbench.util.table import render_table

Row = Mapping[str, Any]
#: function of a row, and of stock transformers' row at the same point (empty if there is none), that returns the cell
Column = Callable[[Row, Row], Any]

NOTES = {
    "tpot": "same: tokens that are equal in captured and eager steps, of those compared; x: TPOT divided by the"
    " roofline's; expected: prediction of the roofline plus the time that the kernels of a compiled step take in"
    " addition to their bytes; GB/s: bytes of weights (without the embedding table), keys and values divided by TPOT;"
    " %: share of the ceiling; peak: peak memory in GiB while decoding",
    "prefill": "Memory in GiB; medians. x: time divided by that of stock transformers (DynamicCache, sdpa), without the"
    " search; above: peak minus weights and the buffers of the cache; layer K/V: new keys and values of one layer",
    "memory": "Memory in GiB. KV: bytes used by the whole batch; x: peak of decoding divided by weights + KV;"
    " roof: TPOT predicted by the roofline; tokens/s: includes search, prefill and decoding",
}


def _value(row: Row, *keys: str, factor: float | None = None) -> Any:
    """Return a nested value of a row, multiplied by `factor` if given; None if a key is missing."""
    node: Any = row
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if node is None or factor is None else node * factor


def _figure_column(*keys: str, factor: float | None = None) -> Column:
    return lambda row, stock: _value(row, *keys, factor=factor)


_ms, _gib = partial(_figure_column, factor=1e3), partial(_figure_column, factor=2**-30)


def _of_stock(column: Column) -> Column:
    return lambda row, stock: column(stock, row)


def _same_tokens(row: Row, stock: Row) -> str:
    return f"{row['same']['alike']}/{row['same']['of']}" if "same" in row else "-"


def _over_stock(row: Row, stock: Row) -> float | None:
    mine, other = row.get("prefill_s"), stock.get("prefill_s")
    return mine / other if mine and other else None


def _above(row: Row, stock: Row) -> float | None:
    """Return the GiB by which the prefill's peak memory exceeds weights and cache buffers; `stock` is not used."""
    peak, reserved = _value(row, "peak", "prefill"), _value(row, "kv_reserved", "total")
    return None if peak is None or reserved is None else (peak - row["weights"] - reserved) / 2**30


COLUMNS: dict[str, dict[str, Column]] = {
    "tpot": {
        "TPOT ms": _ms("tpot_s", "median"),
        "p10": _ms("tpot_s", "p10"),
        "p90": _ms("tpot_s", "p90"),
        "p99": _ms("tpot_s", "p99"),
        "first": _ms("first_step_s"),
        "roof": _ms("predicted", "tpot_s"),
        "x": _figure_column("over_roof"),
        "expected": _ms("predicted", "expected_tpot_s"),
        "GB/s": _figure_column("GB_s"),
        "% read": _figure_column("read_share", factor=100.0),
        "same": _same_tokens,
        "peak": _gib("peak", "decode"),
        "steps": _figure_column("stepping"),
    },
    "prefill": {
        "search ms": _ms("search_s"),
        "ms": _ms("prefill_s"),
        "stock ms": _of_stock(_ms("prefill_s")),
        "x": _over_stock,
        "peak": _gib("peak", "prefill"),
        "stock peak": _of_stock(_gib("peak", "prefill")),
        "weights": _gib("weights"),
        "KV": _gib("kv_used", "total"),
        "above": _above,
        "layer K/V": _gib("layer_kv"),
        "path": _figure_column("prefill_path"),
    },
    "memory": {
        "TTFT ms": _ms("ttft_s"),
        "TPOT ms": _ms("tpot_s", "median"),
        "roof": _ms("predicted", "tpot_s"),
        "tokens/s": _figure_column("tokens_per_s"),
        "weights": _gib("weights"),
        "KV": _gib("kv_used", "total"),
        "peak dec": _gib("peak", "decode"),
        "x": _figure_column("over_used"),
        "peak pre": _gib("peak", "prefill"),
        "steps": _figure_column("stepping"),
    },
}
HEAD = ("setting", "prompt", "B", "new")


def point_cells(row: Row, command: str, rows: Sequence[Row]) -> list[object]:
    """Return one line of the table, the figures of one measured point (prompt length and batch size), as cells.

    The first cells are the columns of :data:`HEAD`, the others those of ``COLUMNS[command]``. If the measurement
    failed, the last cell is the reason, and the command's other cells are None.

    Among all records so far, `rows`, the one with the setting ``dynamic`` (transformers' DynamicCache) and the same
    prompt length and batch size supplies the columns that compare with stock transformers.
    """
    start: list[object] = [row["setting"], short_count(row["prompt"]), row["batch"], row["new_tokens"]]
    columns = COLUMNS[command]
    if row["status"] != "ok":
        return [*start, *[None] * (len(columns) - 1), why_no_figures(row)]
    at = (row["prompt"], row["batch"])
    stock = next((one for one in rows if one["setting"] == "dynamic" and (one["prompt"], one["batch"]) == at), {})
    return [*start, *(column(row, stock) for column in columns.values())]


def why_no_figures(row: Row) -> str:
    """Describe in one line why a point was not measured; if memory ran out, with phase and bytes where known."""
    if row["status"] != "oom":
        return str(row["message"])
    asked = row.get("bytes_asked")
    phase = f" in {row['phase']}" if row.get("phase") else ""
    return f"oom{phase}" + (f", {asked / 2**30:.2f} GiB asked for" if asked else "")


def point_table(rows: Sequence[Row], command: str) -> str:
    """Return the table of all measured points as text.

    For ``memory`` the lines are in the order of measurement, otherwise they are sorted by prompt length and batch size.
    """
    ordered = rows if command == "memory" else sorted(rows, key=lambda row: (row["prompt"], row["batch"]))
    return render_table([*HEAD, *COLUMNS[command]], [point_cells(row, command, rows) for row in ordered], len(HEAD))
