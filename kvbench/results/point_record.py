"""Measured points as typed records, read from the result files of runs and of the bench, of any version.

A point's record is the dict that :class:`kvbench.measure.meter.Meter` returns: rows of ``dataset=efficiency`` hold it
under ``measured.point``, JSON files of ``kvbench.bench`` in ``rows``. Files without a ``schema`` (before version 2)
use different keys for the same figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import DataError


@dataclass(frozen=True)
class MeasuredPoint:
    """Time and memory of one setting, measured at one prompt length and batch size.

    Times are in seconds and sizes in bytes. Figures that were not measured are None. :func:`from_record` describes the
    model, device, setting, limit and other conditions.
    """

    model: str
    device: str
    setting: str
    prompt: int
    batch: int
    new_tokens: int
    limit_gb: float | None
    status: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    weights: int | None = None
    kv_used: int | None = None
    peak_decode: int | None = None
    peak_prefill: int | None = None
    predicted_tpot_s: float | None = None
    expected_tpot_s: float | None = None
    stepping: str = ""
    how: str = ""
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    read_bytes: int | None = None
    read_share: float | None = None

    @property
    def group(self) -> tuple[Any, ...]:
        """Key for grouping points measured under the same conditions; these may differ in setting and batch size."""
        return self.model, self.device, self.limit_gb, self.how, self.new_tokens, self.prompt


def from_record(
    record: Mapping[str, Any],
    *,
    model: str,
    device: str,
    setting: str,
    limit_gb: float | None,
    how: str,
) -> MeasuredPoint:
    """Convert a measured point from a result file to a :class:`MeasuredPoint`, whatever version of kvbench wrote it.

    Before version 2, some keys of `record` were different: ``context`` (now ``prompt``), ``steps`` (``new_tokens``
    minus one), ``kv`` (``kv_used.total``) and ``peak_decode`` (``peak.decode``).

    Args:
        setting: method, quantizer and their options, as tables show them.
        limit_gb: memory limit of the run in GiB; None without a limit.
        how: other conditions of the measurement as text, from :func:`circumstances`.

    Raises:
        KeyError, TypeError: `record` is not a measured point.
    """
    prompt = record["prompt"] if "prompt" in record else record["context"]
    new_tokens = record.get("new_tokens", record.get("steps", 0) + 1)
    start = (model, device, setting, prompt, record["batch"], new_tokens, limit_gb, record["status"])
    if record["status"] != "ok":
        return MeasuredPoint(*start, how=how)
    peak, predicted, itl = (record.get(key) or {} for key in ("peak", "predicted", "itl_s"))
    return MeasuredPoint(
        *start,
        ttft_s=record.get("ttft_s"),
        tpot_s=record["tpot_s"]["median"],
        tokens_per_s=None if record.get("fill") == "random" else record.get("tokens_per_s"),
        weights=record.get("weights"),
        kv_used=(record.get("kv_used") or {}).get("total", record.get("kv")),
        peak_decode=peak.get("decode", record.get("peak_decode")),
        peak_prefill=peak.get("prefill"),
        predicted_tpot_s=predicted.get("tpot_s"),
        expected_tpot_s=predicted.get("expected_tpot_s"),
        stepping=record.get("stepping", ""),
        how=how,
        itl_p50_s=itl.get("p50"),
        itl_p90_s=itl.get("p90"),
        itl_p99_s=itl.get("p99"),
        read_bytes=record.get("read_bytes"),
        read_share=record.get("read_share"),
    )


def circumstances(dtype: str | None, compiled: bool, fill: str | None) -> str:
    """Describe the conditions of a measurement as text: dtype, compilation and content of the cache.

    An example is ``bfloat16, compiled``. Only points with the same conditions should be compared. `dtype` is None if it
    is unknown; `fill` is ``random`` if the cache was filled with random keys and values instead of a prompt's.
    """
    parts = (dtype, "compiled" if compiled else None, "random keys and values" if fill == "random" else None)
    return ", ".join(filter(None, parts))


def bench_points(path: Path) -> Iterator[MeasuredPoint]:
    """Read the points that ``kvbench.bench tpot`` or ``kvbench.bench memory`` measured from their JSON file.

    Only points that were measured or that ran out of memory are included. A file of another command of
    ``kvbench.bench`` yields nothing.

    Raises:
        DataError: the file cannot be read, or an entry is not a point.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}\n  hint: measure it again, or do not name this file") from None
    command = str(content.get("command", "")).split() if isinstance(content, dict) else ["none"]
    if command[:1] not in ([], ["memory"], ["tpot"]):
        return
    for row in content.get("rows", ()):
        if row.get("status") not in ("ok", "oom"):
            continue
        try:
            yield from_record(
                row,
                model=content["model"],
                device=content["device"],
                setting=row["setting"] + (", eager" if row.get("graphs") == "never" else ""),
                limit_gb=content.get("memory_limit_gb"),
                how=circumstances(content.get("dtype"), row.get("compile", "--compile" in command), row.get("fill")),
            )
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: a row is not a measured point ({error})\n  hint: do not name this file") from None
