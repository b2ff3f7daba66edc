"""Points from where they lie: runs of dataset=efficiency, and JSON files of ``kvbench.bench memory | tpot``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvbench.errors import DataError
from kvbench.results.samples import MEASURED
from kvbench.results.store import RunStore, find_runs
from kvbench.results.tables import labels


@dataclass(frozen=True)
class Point:
    """One measured point; times in seconds, sizes in bytes, None where they were not measured."""

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

    @property
    def group(self) -> tuple[Any, ...]:
        """Points of one group differ in setting and batch alone."""
        return self.model, self.device, self.limit_gb, self.how, self.new_tokens, self.prompt


def read(places: Sequence[Path]) -> list[Point]:
    """Points of files and folders (of runs, of files), each once; a later file wins.

    Raises:
        FileNotFoundError: a place that is not there.
        DataError: a file is damaged.
    """
    found: dict[tuple[Any, ...], Point] = {}
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place}: there is no such file or folder")
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        for point in chain(runs(place), *map(bench, files)):
            found[(*point.group, point.setting, point.batch)] = point
    return list(found.values())


def bench(path: Path) -> Iterator[Point]:
    """Points of one JSON file; rows that failed for another reason than memory are none, nor are a prompt's alone.

    Raises:
        DataError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}\n  hint: measure it again, or leave it out") from None
    typed = str(content.get("command", "")).split() if isinstance(content, dict) else ["none"]
    if typed[:1] not in ([], ["memory"], ["tpot"]):
        return
    for row in content.get("rows", ()):
        if row.get("status") not in ("ok", "oom"):
            continue
        try:
            yield point(
                row,
                model=content["model"],
                device=content["device"],
                setting=row["setting"] + (", eager" if row.get("graphs") == "never" else ""),
                prompt=row["prompt"] if "prompt" in row else row["context"],
                new_tokens=row.get("new_tokens", row.get("steps", 0) + 1),
                limit=content.get("memory_limit_gb"),
                how=told(content.get("dtype"), row.get("compile", "--compile" in typed), row.get("fill")),
            )
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: a row is no point ({error})\n  hint: leave the file out") from None


def told(dtype: str | None, compiled: bool, fill: str | None) -> str:
    """What sets points apart beside their setting, in words."""
    said = (dtype, "compiled" if compiled else None, "random keys and values" if fill == "random" else None)
    return ", ".join(filter(None, said))


def runs(folder: Path) -> Iterator[Point]:
    """Points of all runs in a folder."""
    stores: list[tuple[RunStore, Mapping[str, Any]]] = []
    for store in find_runs(folder):
        found = store.metrics()
        if found is not None and any(entry.get("points") for entry in found["scores"].values()):
            stores.append((store, found))
    for (store, metrics), label in zip(stores, labels([metrics for _, metrics in stores]), strict=True):
        runtime = (store.config() or {}).get("runtime") or {}
        eager = ", eager" if runtime.get("graphs") == "never" else ""
        for row in store.samples().rows.values():
            figures = row[MEASURED].get("point")
            if figures:
                yield point(
                    figures,
                    model=metrics["config"]["model"],
                    device=row[MEASURED]["device"],
                    setting=label + eager,
                    prompt=figures["prompt"],
                    new_tokens=figures["new_tokens"],
                    limit=runtime.get("memory_limit_gb"),
                    how=told(row[MEASURED].get("dtype"), bool(runtime.get("compile")), None),
                )


def point(
    row: Mapping[str, Any],
    *,
    model: str,
    device: str,
    setting: str,
    prompt: int,
    new_tokens: int,
    limit: float | None,
    how: str,
) -> Point:
    """A point from its figures."""
    start = (model, device, setting, prompt, row["batch"], new_tokens, limit, row["status"])
    if row["status"] != "ok":
        return Point(*start, how=how)
    peak = row.get("peak") or {}
    filled = row.get("fill") == "random"
    return Point(
        *start,
        ttft_s=row.get("ttft_s"),
        tpot_s=row["tpot_s"]["median"],
        tokens_per_s=None if filled else row.get("tokens_per_s"),
        weights=row.get("weights"),
        kv_used=(row.get("kv_used") or {}).get("total", row.get("kv")),
        peak_decode=peak.get("decode", row.get("peak_decode")),
        peak_prefill=peak.get("prefill"),
        predicted_tpot_s=(row.get("predicted") or {}).get("tpot_s"),
        expected_tpot_s=(row.get("predicted") or {}).get("expected_tpot_s"),
        stepping=row.get("stepping", ""),
        how=how,
    )
