"""Points of time and memory that were measured on another machine: JSON files of ``kvbench.bench memory | tpot``.

``python -m kvbench.bench memory --model llama2-7b --settings ... --out results/h200/papers --name NAME`` writes such a
file; every file of :data:`FOLDERS` is read, and a later folder or name wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.fold.cells import OUT_OF_MEMORY
from experiments.fold.grid import Source
from experiments.item import Column
from kvbench.bench.choices import shape_of
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError
from kvbench.profiling.roofline import Shape
from kvbench.tasks.efficiency import point_id

FOLDERS = tuple(Path(__file__).resolve().parents[2] / "results" / "h200" / name for name in ("whole", "papers"))
Key = tuple[Shape, str, int, int, float | None]


def point_source(model: str, setting: str, column: Column, folders: tuple[Path, ...] = FOLDERS) -> Source | None:
    """Return the source of one point; None if no file has it. Above a batch that ran out of memory, all did.

    Args:
        model: preset of the model; the points of a model with the same dimensions are its points too.
        setting: the setting; settings that are written differently but choose the same are the same.
        column: has the prompt length, the batch and the memory limit.
        folders: folders of the files.
    """
    by_key, chosen, shape = stored_points(folders), canonical(setting), shape_of(model)
    source = by_key.get((shape, chosen, column.prompt, column.batch, column.memory_gb))
    if source is not None:
        return source
    ended = [
        (key[3], source)
        for key, source in by_key.items()
        if (*key[:3], key[4]) == (shape, chosen, column.prompt, column.memory_gb)
        and source.reason.startswith(OUT_OF_MEMORY)
    ]
    smaller = [pair for pair in ended if pair[0] < column.batch]
    return min(smaller, key=lambda pair: pair[0])[1] if smaller else None


@cache
def canonical(setting: str) -> str:
    """Return a text that two settings share if they choose the same, however they are written.

    Raises:
        ConfigError: the text is not a setting, such as the name of a cache of stock transformers.
    """
    method = parse_setting(setting).load()
    name = type(method).__name__
    return repr((name, sorted(method.hyperparameters().items(), key=str), method.quantizer))


@cache
def stored_points(folders: tuple[Path, ...]) -> Mapping[Key, Source]:
    """Return the points of all files in some folders, by :data:`Key`: dimensions, setting, prompt, batch, limit in GiB.

    A point that ran out of memory is a source without rows whose reason says so.
    """
    by_key: dict[Key, Source] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*.json"))]:
        content = stored.content(path)
        for record in content.get("rows", ()):
            try:
                limit = content.get("memory_limit_gb")
                setting = canonical(record["setting"])
                key = (shape_of(content["model"]), setting, record["prompt"], record["batch"], limit)
            except (KeyError, ConfigError):
                continue  # another command's file, or a cache of stock transformers
            by_key[key] = _record_source(path, content, record)
    return by_key


def _record_source(path: Path, content: Mapping[str, Any], record: Mapping[str, Any]) -> Source:
    device = str(content.get("device", ""))
    note = ", ".join(part for part in (device, record.get("stepping", "").split(" (")[0]) if part)
    if record["status"] == "oom":
        return Source({}, (path.name,), f"{OUT_OF_MEMORY} on {device}", note)
    if record["status"] != "ok":
        return Source({}, (path.name,), f"{record['status']} on {device}", note)
    name = point_id(record["prompt"], record["batch"])  # as in a run: points of several files are compared
    return Source({name: {"id": name, "measured": {"point": record}}}, (path.name,), "", note)
