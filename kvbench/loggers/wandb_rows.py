"""Samples of a run as Weights & Biases gets them: for each, a step of the history and a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.loggers.base import MIB, charted
from kvbench.loggers.csv import flatten
from kvbench.results.aggregate import percentile, score_key
from kvbench.results.samples import MEASURED

_TEXTS = ("prompt_head", "prompt_tail", "prediction", "reference", "finish")
#: columns of the table of samples; those of :data:`_TEXTS` that no row has are left out
COLUMNS = ("id", "task", "length", "prompt_tokens", "truncated", *_TEXTS)
#: figures of a sample that are columns of the table too
_FIGURES = ("kv_MiB", "peak_MiB/prefill", "peak_MiB/decode", "ttft_ms", "tpot_ms", "tokens_per_s")

Row = Mapping[str, Any]


def history(row: Row) -> dict[str, Any]:
    """Return the figures of one sample as a step of the history, under names that begin with ``sample/``.

    Times of warm-up samples are left out, as in `metrics.json`.
    """
    key = score_key(row)
    values = {
        f"{key}/score": row["scores"].get("score"),
        f"{key}/nll": (row.get("nll") or {}).get("sum"),
        "prompt_tokens": row.get("prompt_tokens"),
        **figures(row),
    }
    flat = {name.replace(".", "/"): value for name, value in flatten(_measured(row).get("point") or {}, key).items()}
    values |= {name: value for name, value in charted(flat).items() if isinstance(value, (int, float))}
    steps = inter_token_ms(row)
    values |= {f"inter_token_ms/p{q}": percentile(steps, q) for q in (50, 90, 99)}
    return {f"sample/{name}": value for name, value in values.items() if value is not None}


def figures(row: Row) -> dict[str, Any]:
    """Return what was measured of one sample: KV size and memory peaks in MiB, TTFT, TPOT and tokens per second.

    ``tpot_ms`` is the median time of a decode step without the first one, which is ``first_step_ms``. ``tokens_per_s``
    is the throughput of the sample's whole batch. Unknown figures are None.
    """
    measured = _measured(row)
    peaks = measured.get("peak_bytes") or {}
    used = ((row.get("kv_bytes") or {}).get("used") or {}).get("total")
    values = {
        "kv_MiB": _scaled(used, 1 / MIB),
        **{f"peak_MiB/{phase}": _scaled(peaks.get(phase), 1 / MIB) for phase in ("prefill", "decode")},
    }
    if measured.get("warm_up"):
        return values
    steps = measured.get("step_s") or []
    seconds = (measured.get("decode_s") or sum(steps)) / (measured.get("batch_rows") or 1)
    return values | {
        "ttft_ms": _scaled(measured.get("ttft_s"), 1000),
        "first_step_ms": _scaled(steps[0] if steps else None, 1000),
        "tpot_ms": percentile(inter_token_ms(row), 50),
        "tokens_per_s": (measured.get("decoded") or 0) / seconds if seconds and measured.get("decoded") else None,
    }


def inter_token_ms(row: Row) -> list[float]:
    """Return the times between the tokens of a sample in milliseconds, without the first; empty for warm-ups."""
    measured = _measured(row)
    steps = [] if measured.get("warm_up") else (measured.get("step_s") or [])[1:]
    return [1000 * step for step in steps]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the lines of the table of samples."""
    texts = [name for name in _TEXTS if any(row.get(name) is not None for row in rows)]
    columns = [name for name in COLUMNS if name not in _TEXTS or name in texts]
    lines = []
    for row in rows:
        measured = figures(row)
        lines.append([*map(row.get, columns), row["scores"].get("score"), *map(measured.get, _FIGURES)])
    return [*columns, "score", *_FIGURES], lines


def _measured(row: Row) -> Mapping[str, Any]:
    return row.get(MEASURED) or {}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
