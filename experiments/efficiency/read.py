"""Points from runs of dataset=efficiency and from JSON files of ``kvbench.bench memory | tpot``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kvbench.results.point_record import Point, bench_points, circumstances, from_record
from kvbench.results.samples import MEASURED
from kvbench.results.store import find_runs
from kvbench.results.tables import labels

__all__ = ["Point", "read"]


def read(places: Sequence[Path]) -> list[Point]:
    """Return the points of files and folders (of runs, of files), each once; a later file wins.

    Raises:
        FileNotFoundError: a place does not exist.
        DataError: a file is damaged.
    """
    points: dict[tuple[Any, ...], Point] = {}
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place} does not exist")
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        for point in chain(run_points(place), *map(bench_points, files)):
            points[(*point.group, point.setting, point.batch)] = point
    return list(points.values())


def run_points(folder: Path) -> Iterator[Point]:
    """Yield the points of all runs in a folder."""
    stores = [(store, content) for store in find_runs(folder) if (content := store.metrics()) is not None]
    stores = [(store, content) for store, content in stores if any(e.get("points") for e in content["scores"].values())]
    for (store, content), label in zip(stores, labels([content for _, content in stores]), strict=True):
        runtime = (store.config() or {}).get("runtime") or {}
        eager = ", eager" if runtime.get("graphs") == "never" else ""
        for row in store.samples().rows.values():
            record = row[MEASURED].get("point")
            if record:
                yield from_record(
                    record,
                    model=content["config"]["model"],
                    device=row[MEASURED]["device"],
                    setting=label + eager,
                    limit_gb=runtime.get("memory_limit_gb"),
                    how=circumstances(row[MEASURED].get("dtype"), bool(runtime.get("compile")), record.get("fill")),
                )
